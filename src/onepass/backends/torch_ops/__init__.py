"""Families that are made of torch operations, on any device."""
