"""Random programs around one call of a norm, run by torch and by onepass. See `__main__.py`."""
