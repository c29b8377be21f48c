"""The command line `onepass`: arguments.py defines the commands, main.py runs one, and each command has a file of its own.

The file of a command has `run(args)`, which returns the exit status: 0, or 1 if a check failed. A wrong argument exits with 2.
"""
