"""How good a method is: replays of traces, recall, statistics of attention, and tasks that models answer.

`replay.py` is `evaluate`, which measures what a method recovered, read and got wrong at each step of a trace. It may
use `serving`, `models`, `cache`, `roles`, `traces` and what lies below them.
"""
