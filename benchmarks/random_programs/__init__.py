"""Runs random programs, each around one call of a norm, with torch and with onepass. See `__main__.py`."""
