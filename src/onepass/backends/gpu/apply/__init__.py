"""Given statistics: y from x in one pass."""
