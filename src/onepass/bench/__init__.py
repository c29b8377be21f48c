"""Cases, oracles and timing, for the tests, the command line and the benchmarks. Stands outside: nothing in the library imports it."""
