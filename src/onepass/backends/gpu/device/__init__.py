"""Device code that several kernels share.

A block is [I, J]. Along J memory is contiguous. Along I lie several sets, or several runs of one set. A value that
varies along one of them only has the shape [I, 1] or [1, J], and is loaded that often. Blocks are float32. Numbers in
brackets cite docs/theory.md.
"""
