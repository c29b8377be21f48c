"""Sets too large for one program, shared by programs that run at the same time."""
