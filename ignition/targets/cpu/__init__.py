"""The cpu target: C++ kernels with a model's dimensions as constants, compiled when a core is exported.

lower.py turns op nodes into kernel calls; packing.py lays weights out in blocks of 16 rows; source.py writes the
translation unit that instantiates the kernels of a graph, and compile.py makes it a library for each instruction set.
kernels/ holds the headers: start at kernel.h, the contract between graphs and kernels. core.h and runtime.h run them
behind a small C interface (interface.h), on the threads of pool.h; simd.h is the vector vocabulary that all share.
"""
