"""Targets: what a captured graph is lowered to, and what runs it.

A target takes an op graph (ignition/graph.py) and gives calls of its own kernels over buffers (ignition/lowered.py),
the weights in the layout that those kernels read, and the compiled kernels. It alone knows layouts, fusion and kernels:
planning places its buffers and a replay of flare runs its calls without knowing what they compute.
"""
