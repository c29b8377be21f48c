"""What `onepass bench` needs: rows, providers, timing, results."""
