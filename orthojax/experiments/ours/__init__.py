"""Comparisons of our own, beyond the papers."""
