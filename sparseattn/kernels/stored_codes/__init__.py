"""Codes of sequences' rows, brought together from a store that sequences share."""
