"""The families `tile` and `tile_reread`, whose kernels read memory across sets.

A set is the elements that share one mean and variance. Here the elements of a set lie apart in memory, and those of
other sets lie between them.
"""
