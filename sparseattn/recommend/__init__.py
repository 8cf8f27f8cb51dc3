"""Which method and budget each layer of a model should have: measured, chosen and verified.

It may use `evaluation`, `models`, `cost_model` and what lies below them.
"""
