"""Measuring: the same numbers, for us and for others."""
