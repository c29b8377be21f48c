"""Sets that are contiguous runs: kept by one program, or read twice."""
