"""Linear layers of a few vectors, as in the classifier that picks buckets."""
