"""Attention over one run of stored rows, prepared for all tokens that read them."""
