"""Calls to check (cases) and their correct results (oracles), for tests, `onepass verify` and benchmarks."""
