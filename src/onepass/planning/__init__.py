"""Choose the kernel family that runs a problem, and explain the choice."""
