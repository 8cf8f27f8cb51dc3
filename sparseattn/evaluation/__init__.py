"""How good a method is: replays of traces, recall, statistics of attention, and tasks that models answer.

`replay.py` is `evaluate`, which decodes the end of a trace anew, and `step_measures.py` what a method recovered, read
and got wrong at each step. It may use `serving`, `models`, `cache`, `roles`, `traces` and what lies below them.
"""
