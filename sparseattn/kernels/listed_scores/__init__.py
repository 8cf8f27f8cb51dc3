"""Scores of keys that a list names, read where they lie (QueryBridge)."""
