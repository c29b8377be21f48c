"""The definition of a norm: its axes, its view of memory, its operands and its formulas. Imports no other folder of onepass."""
