"""What `onepass bench` needs: the list of calls to measure, the libraries to compare, the accuracy check, timing and records."""
