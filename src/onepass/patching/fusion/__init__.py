"""Fuse norms with neighbours: activations after them, and sums before them.

- `find`: which norms of a model can be fused, and why others cannot
- `fused_modules`: the classes of modules that call a norm and its neighbour as one
- `rewriting`: rewrites the methods of such modules
"""
