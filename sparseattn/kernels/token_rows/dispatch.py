"""Store one more token of every sequence in a cache's storage, by the implementation that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from sparseattn.kernels.implementations import Operation

TOKEN_ROWS = Operation(__package__, "torch", "numba")
TokenWriter: TypeAlias = "Callable[[Tensor, Tensor, int, int], bool]"  # see `token_writer`


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


def token_writer(storage: Storage, impl: str | None = None) -> TokenWriter:
    """Return a function that writes one more token, what is the same for all tokens being looked up once.

    Args:
        storage: on the CPU.
        impl: see `implementations`.

    Returns:
        A function of keys and values `[B,H,1,D]` of the storage's dtype, of a row below N and of a position. It writes
        the token to that row of every sequence, notes it as the newest, and returns True; or, where keys, values or
        their sum are not finite, writes nothing and returns False.
    """
    writer: TokenWriter = TOKEN_ROWS.pick(impl, storage.keys.device, storage.keys.dtype).token_writer(storage)
    return writer
