"""What records look like: tables on the terminal, plots, and the page of `sparseattn report`.

It may use `recommend`, `evaluation`, `cost_model` and what lies below them.
"""
