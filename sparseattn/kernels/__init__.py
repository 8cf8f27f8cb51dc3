"""A folder an operation: `dispatch.py` has its functions, `reference.py` the specification in torch, `cpu.py` numba's
code and `gpu.py` Triton's.

`implementations.py` picks among them. `numba_*.py` is what compiled code shares, `triton_ahead.py` compiles without a
GPU. It may use `core` and `utils`.
"""
