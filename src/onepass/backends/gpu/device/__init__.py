"""Device code that several kernels share.

Memory is x[o, r, s, t]. A set is the elements of one o and s, which share a mean and a variance. A run is the elements
of one o, r and s, which are contiguous. A kernel works on blocks of shape [I, J], in float32. J indexes elements that are
contiguous in memory, and I indexes several sets, or several runs of one set. A value that varies only along I has the
shape [I, 1], and one that varies only along J has [1, J], so that it is loaded once, and not for every element. Numbers
in brackets, such as (14), are equations of docs/theory.md.
"""
