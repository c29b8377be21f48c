"""What `onepass bench` needs: the suite of rows, providers, the accuracy check, timing and records."""
