"""Find the conditions that a forward branches on, by following it: interpreting its source without running it.

Each value in the source is known (a constant, an attribute of the module, a function), fixed (unknown, but the same in
every call), or varies from call to call. Conditions are treated accordingly:

- A condition on known or fixed values has the same outcome in every call, as long as the numbers, strings and similar
  values behind it do not change. Such values are guarded: each call of the patched module checks them (guards.py).
- A condition on a value that varies is recorded. The trials (recognition/trials.py) must see both outcomes.
- If a condition can be neither followed nor varied by trials, the module stays as it is. Examples are conditions on a
  device, the environment or the clock, and conditions in code that is not Python.

The files, from the top down:

- `analyze`: the functions to call from outside; `bytecode`: handles functions without source
- `statements`, `expressions`, `calls`, `names`: an interpreter of the source; `interpreter`: its base class
- `values`: what is known of a value, and the result of an analysis; `trust`: which functions need not be followed
- `branch_recorder`: records the outcomes of conditions while a trial runs
"""
