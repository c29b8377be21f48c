"""The family `apply`: the mean and variance are given, and one pass over x computes y."""
