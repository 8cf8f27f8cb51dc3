"""Methods that score pages of consecutive rows, each by a small summary of its keys: Quest and its relatives.

`base.py` keeps the entries and chooses the best pages by the scores that a method's own file gives.
"""
