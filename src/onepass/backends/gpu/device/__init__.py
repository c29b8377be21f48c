"""Device code that several kernels share.

A block is [I, J]. Along J memory is contiguous. Along I lie several sets, or several runs of one set. A value that
varies along I only has the shape [I, 1], and one that varies along J only has [1, J]: it is loaded once, not for every
element. Blocks are float32. Numbers in brackets cite docs/theory.md.
"""
