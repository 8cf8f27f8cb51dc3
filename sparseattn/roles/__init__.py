"""Which method and budget each layer or head of a model has, plans in files, and fingerprints of models.

It may use `selectors` and what lies below them.
"""
