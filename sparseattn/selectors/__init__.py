"""The methods: a folder per family, the contract in `base.py`, a row for each in `methods.py`, texts in `registry.py`.

They may use `kernels`, `core` and `utils`.
"""
