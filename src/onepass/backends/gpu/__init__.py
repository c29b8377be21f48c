"""The GPU kernels in Triton and Gluon."""
