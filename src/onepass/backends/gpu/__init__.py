"""The families of GPU kernels, written in Triton and Gluon."""
