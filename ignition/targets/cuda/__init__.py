"""The cuda target: Triton kernels, compiled ahead to cubins and bound to the nodes of CUDA graphs. No GPU is needed.

launch.py is the word for one kernel call: which kernel, with which arguments and constants, on which grid. kernels/ holds the
kernels, each with the function that makes its launches.
"""
