"""Partial moments and partial sums that programs store, and the launches that combine them."""
