"""The kernels: torch operations, C for CPUs, Triton and Gluon for GPUs."""
