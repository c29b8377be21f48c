"""Every validation of arguments and its message."""
