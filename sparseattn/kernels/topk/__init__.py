"""Votes of a group's heads and the best rows or pages, in one pass."""
