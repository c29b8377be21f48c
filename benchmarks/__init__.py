"""What only developers run: benchmarks, stress tests and reports. Not part of the wheel.

Run one from the root of the repository, for example `python -m benchmarks.overhead`.
"""
