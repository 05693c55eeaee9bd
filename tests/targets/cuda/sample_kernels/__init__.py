"""Kernels that tests compile: small ones, and those that the compiler must refuse."""
