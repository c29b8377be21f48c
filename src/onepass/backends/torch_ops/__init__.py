"""The kernel families made of torch operations."""
