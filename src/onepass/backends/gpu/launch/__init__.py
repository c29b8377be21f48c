"""Compiling and launching kernels at little cost to the host."""
