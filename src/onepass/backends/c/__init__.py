"""The CPU kernels in C, and the front door in C++: compiled on first use, for this machine."""
