"""The methods: a folder per family, the contract in `base.py`, rows of text in `methods.py`.

`registry.py` makes a selector from its text.

They may use `kernels`, `core` and `utils`.
"""
