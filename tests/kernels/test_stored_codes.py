"""Codes of sequences' rows, gathered from a shared store: torch's and numba's are those that lie there."""

from __future__ import annotations

import pytest
import torch

from sparseattn.kernels.product_codes.missed_rows import MissedRows, packed, record_bytes
from sparseattn.kernels.stored_codes.dispatch import gather, gather_missed


@pytest.mark.parametrize(("impl", "many"), [("torch", 1 << 19), ("numba", 1 << 19), ("numba", 1)])
def test_gathered_codes_are_those_of_the_tables_entries(impl: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread and, of many, by several."""
    if impl == "numba":
        pytest.importorskip("numba")
        monkeypatch.setattr("sparseattn.kernels.stored_codes.cpu.MANY", many)
    heads, entries, count, unit = 3, 11, 4, 32
    whole = torch.randint(0, 256, (heads, entries, count, unit), dtype=torch.uint8)
    table = torch.tensor([[5, 0, 10], [7, 7, -1]], dtype=torch.int32)
    found = gather(whole.transpose(0, 1), table, impl=impl)
    assert found.shape == (2, heads, count, 3 * unit)
    for b, e in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        own = found[b, :, :, e * unit : (e + 1) * unit]
        torch.testing.assert_close(own, whole[:, table[b, e]], rtol=0, atol=0)
    assert gather(whole.transpose(0, 1), table[:, :0], impl=impl).shape == (2, heads, count, 0)


@pytest.mark.parametrize("impl", ["torch", "numba"])
def test_gathered_records_name_rows_of_the_sequences(impl: str) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    heads, entries, each, size, unit = 2, 7, 2, 24, 32
    ids, missed = torch.randint(0, unit, (heads, entries, each)), torch.randn(heads, entries, each, size)
    made = packed(ids.flatten(1)[None], missed.flatten(1, 2)[None])[0]
    store = made.unflatten(1, (entries, each)).flatten(2).transpose(0, 1)  # a head's entries lie one behind another
    table = torch.tensor([[5, 0, 6], [3, -1, -1]], dtype=torch.int32)
    turn = torch.eye(size).expand(2, heads, size, size)
    found = MissedRows(gather_missed(store, table, record_bytes(size), unit, impl=impl), turn)
    for b, names in enumerate(table.tolist()):
        for e, name in enumerate(names):
            own = slice(e * each, (e + 1) * each)
            wanted = ids[:, name] + e * unit if name >= 0 else torch.full((heads, each), -1)
            assert torch.equal(found.ids[b, :, own].long(), wanted)
            kept = missed[:, name] if name >= 0 else torch.zeros(heads, each, size)
            torch.testing.assert_close(found.missed()[b, :, own], kept, rtol=0, atol=0.35)
    assert gather_missed(store, table[:, :0], record_bytes(size), unit, impl=impl).shape == (2, heads, 0, 24)


def test_a_store_of_another_layout_is_refused() -> None:
    pytest.importorskip("numba")
    store = torch.zeros(4, 2, 32, 4, dtype=torch.uint8).transpose(2, 3)
    with pytest.raises(ValueError, match="a head's bytes of an entry are adjacent"):
        gather(store, torch.zeros(1, 1, dtype=torch.int32), impl="numba")
    with pytest.raises(ValueError, match=r"rows of an entry, strides and offset are multiples of 8, got 12 rows"):
        gather(torch.zeros(4, 2, 4, 12, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32), impl="numba")
    with pytest.raises(ValueError, match=r"and strides, offset and width multiples of 8, got .* and width 12"):
        gather_missed(torch.zeros(4, 2, 24, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.int32), 12, 32, "numba")
