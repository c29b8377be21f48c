"""The command line `onepass`: `main` reads the arguments, and each command has a file of its own.

Each of these files has `add_arguments(parser)` and `run(args)`. `run` returns the exit status, which is 1 if a check
failed.
"""
