"""What only developers run: stress tests, resources, whole models, random problems. Not part of the wheel."""
