"""The CPU kernels in C: compiled on first use, called through ctypes."""
