"""The methods: a folder a family, the contract in `base.py`, every method by name in `names.py` and `registry.py`.

They may use `kernels`, `core` and `utils`.
"""
