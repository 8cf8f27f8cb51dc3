"""Drafts of a sparse step, checked by full attention: the parts of `models/lossless.py`.

May use `models`, `cache`, `selectors` and `core`.
"""
