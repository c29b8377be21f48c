"""Which family runs a problem, and why."""
