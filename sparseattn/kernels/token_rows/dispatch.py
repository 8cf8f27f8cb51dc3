"""Store one more token of every sequence in a cache's storage, by the implementation that fits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparseattn.kernels.implementations import Operation

PUT = Operation(__package__, "torch", "numba")


class Storage(NamedTuple):
    """Where a cache keeps the rows of B sequences and H heads, spare capacity included, and what steps read of them.

    Args:
        keys, values: `[B,H,N,D]` of one dtype, contiguous.
        positions: `[B,N]` int64, contiguous, on the CPU.
        rows: `[B]` int32, one past the newest row.
        newest: `[B]` int64, the newest row's position.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    rows: Tensor
    newest: Tensor


def put(keys: Tensor, values: Tensor, storage: Storage, row: int, position: int, impl: str | None = None) -> bool:
    """Write a token's key and value to `row` of every sequence, and note it as the newest.

    Args:
        keys, values: `[B,H,1,D]`, of the storage's dtype.
        storage: on the CPU.
        row: below N.
        position: of the token.
        impl: see `implementations`.

    Returns:
        Whether keys and values are finite, and their sum too. Else nothing is written.
    """
    return bool(PUT.pick(impl, keys.device, keys.dtype).put(keys, values, storage, row, position))
