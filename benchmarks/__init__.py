"""Benchmarks, stress tests and reports for developers. They are not part of the wheel.

Run one from the root of the repository, for example `python -m benchmarks.overhead`.
"""
