"""Checks of what users pass, and the error messages.

A message begins with torch's own phrase, raised as torch's own exception type. What was found, what was expected and
the likely fix follow. A call that fails a check has changed no tensor.

- `arguments`: Python values, such as eps, momentum and normalized_shape;
- `tensors`: properties of tensors that several norms require;
- `norms`: the tensors of each norm;
- `extras`: what torch's norms do not have, such as activation and modulate;
- `out`: tensors that a call writes to;
- `operands`: everything a kernel receives;
- `saved`: tensors that autograd hands back to a backward.

Functions named `as_...` return the checked value in the form that the package uses. `require_...` and `check_...` only
raise.
"""
