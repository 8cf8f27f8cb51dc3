"""The page that `sparseattn report` writes: a file for each kind of record makes a section of sentences and views.

A kind is a module with `FILE`, the name of the records in a folder, `check(line, lines above)`, which refuses what is
no record when the file is read, and `section(records)`, which takes them as they are; `kinds.py` lists them. A section
is sentences and views (`views.py`); a view's script is in `assets`, and no script knows a kind.
"""
