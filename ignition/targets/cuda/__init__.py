"""The cuda target: Triton kernels, compiled ahead to cubins and bound to the nodes of CUDA graphs. No GPU is needed.

launch.py is the word for one kernel call: which kernel, with which arguments and constants, on which grid. kernels/ holds the
kernels, each with the function that makes its launches; sample_graph.py says which ones draw and score.

export.py is the target's part in an export: places.py and sizes.py say which nodes have kernels, limits.py which options they
take; lower.py makes works (works.py) of a captured graph, over operands.py; compile.py makes cubins of their launches, in
processes of compile_worker.py; graphs.py places memory and makes nodes; packing.py lays out the weights.
"""
