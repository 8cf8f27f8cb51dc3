"""Logits of listed rows by product codes of their keys."""
