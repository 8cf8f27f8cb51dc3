"""What records look like: tables (`table.py`), plots, and the page of `sparseattn report` (`html`).

It may use `recommend`, `evaluation`, `cost_model` and what lies below them.
"""
