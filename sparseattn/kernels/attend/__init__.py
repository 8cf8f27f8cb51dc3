"""Attention of one query per head over the rows that a selection names: `cpu.py` by numba, `gpu.py` by Triton.

`gather.py` is torch that runs anywhere, `reference.py` the specification; `kernels.dispatch` chooses among them.
"""
