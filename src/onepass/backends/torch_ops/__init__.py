"""Families made of torch operations."""
