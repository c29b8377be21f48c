"""The ring family, for Hopper GPUs: x stays in a ring buffer in shared memory until the statistics are known."""
