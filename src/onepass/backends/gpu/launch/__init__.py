"""Compiles kernels, and launches them with little host time."""
