"""Compiling kernels, and launching them with little time on the CPU."""
