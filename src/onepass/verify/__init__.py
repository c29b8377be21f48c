"""Cases and oracles that tests, `onepass verify` and benchmarks share."""
