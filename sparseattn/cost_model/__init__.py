"""How long a step takes on a machine: measured once, then predicted for any method, length and budget.

It may use `cache` and what lies below it.
"""
