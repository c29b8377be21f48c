"""Teams on Hopper: x stays in a ring of blocks in shared memory until the statistics are known."""
