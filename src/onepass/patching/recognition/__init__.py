"""Find the norm of onepass that a module computes.

- `recognize`: the answer for one module, and `register` for classes that it cannot find on its own
- `candidates`: the norms that a module could be
- `trials`: compares a module with a candidate on random input
- `trial_cases`: the inputs of trials; `stand_ins`: copies of modules, on which trials run
- `activations`: the same for activations
"""
