"""The families that run on the CPU, one module each; `formula` and `definition` use torch operations and run on any device."""
