"""Fuse norms with their neighbours: a norm then also computes the activation after it, or the sum before it.

- `find`: finds which norms of a model can be fused, and why others cannot
- `fused_modules`: the new classes of modules that compute a norm and its neighbour in one call
- `rewriting`: rewrites the methods of such modules
"""
