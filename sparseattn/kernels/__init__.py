"""A folder an operation, each with `reference.py` (the specification), `cpu.py` (numba) and `gpu.py` (Triton).

`dispatch.py` has `attend` and chooses its implementation; `scoring.py` does so for what selectors compute. It may use
`core` and `utils`.
"""
