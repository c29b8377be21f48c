"""Check what users pass, and raise errors with helpful messages.

Where torch raises an error, the error here has the same exception type, and its message begins with torch's own words. Every
message says what was found, what was expected, and how to fix it. A call that fails a check has changed no tensor.

- `arguments`: Python values, such as eps, momentum and normalized_shape;
- `tensors`: properties of tensors that several norms require;
- `norms`: the tensors of each norm;
- `extras`: arguments that torch's norms do not have, such as activation and modulate;
- `out`: tensors that a call writes to;
- `operands`: all tensors that a kernel receives;
- `saved`: tensors that autograd hands back to a backward.

Functions named `as_...` check a value and return it in the form that the package uses. `require_...` and `check_...` only
raise errors.
"""
