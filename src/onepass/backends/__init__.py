"""The kernel families: torch operations, C for CPUs, Triton and Gluon for GPUs."""
