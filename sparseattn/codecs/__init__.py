"""How a cache keeps sealed rows small: the contract (`base.py`), the registry (`table.py`), and a file for each codec.

A codec says how rows are kept, a selector which of them are read. It may use `selectors` and what lies below them.
"""
