"""The page that `sparseattn report` writes: a file for each kind of record makes a section, and scripts draw its views.

A kind is a module with `FILE`, the name of the records in a folder, and `section(records)`; `kinds.py` lists them. A
section is sentences and views (`views.py`); a view's script is in `assets`, and no script knows a kind.
"""
