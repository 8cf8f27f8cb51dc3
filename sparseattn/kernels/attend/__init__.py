"""Attention of one query per head over the rows that a selection names (`dispatch.attend`).

`cpu.py` is by numba, `gpu.py` by Triton, `gather.py` by torch that runs anywhere; `reference.py` is the specification.
`merge.py` joins attention over disjoint rows, `weights.py` has what each row weighed.
"""
