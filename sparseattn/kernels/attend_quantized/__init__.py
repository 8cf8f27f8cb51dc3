"""Attention over rows that are stored in few bits."""
