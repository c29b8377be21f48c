"""Find the norm of onepass that a module computes.

- `recognize`: finds the norm for one module; `register` lets users name the norm that a class computes
- `candidates`: the norms that a module may compute
- `trials`: compares a module with a candidate on random input
- `trial_cases`: the inputs of trials; `stand_ins`: the copies of modules on which trials run
- `activations`: finds the activation of onepass that a module or a function computes
"""
