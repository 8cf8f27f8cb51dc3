"""Logits of rows, and the best rows, by product codes of their keys."""
