"""The families `row` and `row_reread`, whose kernels read each set along its contiguous runs.

A set is the elements that share one mean and variance. A run is a stretch of a set that is contiguous in memory.
"""
