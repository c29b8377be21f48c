"""Teams on Hopper: blocks of x stay in a ring of shared memory between reduction and application."""
