"""The command line `onepass`: main.py reads the arguments, and each command has a file of its own.

The file of a command has `add_arguments(parser)` and `run(args)`. `run` returns the exit status: 0, or 1 if a check failed.
"""
