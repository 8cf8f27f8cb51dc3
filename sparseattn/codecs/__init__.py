"""How a cache keeps sealed rows small: the contract (`base.py`), rows of text (`table.py`), a file for each codec.

`registry.py` makes a codec from its text.

A codec says how rows are kept, a selector which of them are read. It may use `selectors` and what lies below them.
"""
