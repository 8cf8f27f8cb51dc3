"""How the rows of an engine's sequences lie: torch's tables and those of compiled code, which name every row once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseattn.kernels.attend_vllm_blocks import cpu_tables
from sparseattn.serving.vllm.page_tables import PageZones


@pytest.mark.parametrize(
    ("page", "unit", "block", "sink", "window"), [(16, 16, 128, 4, 64), (32, 64, 128, 0, 1), (16, 64, 64, 200, 100)]
)
def test_tables_name_every_row_once(page: int, unit: int, block: int, sink: int, window: int) -> None:
    zones = PageZones(page, unit, block, sink, window)
    rows = torch.tensor([1, 63, 64, 65, 300, 1000, 777], dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randperm(7 * 16, generator=draw).view(7, 16).int()  # of each sequence, anywhere
    most = int(rows.max())
    table, (always, tails) = zones.entries(rows, blocks, most), zones.always(rows, blocks)
    compiled = cpu_tables.tables(
        rows.numpy(), blocks.numpy(), page, unit, block, zones.first, window, most, zones.recent
    )
    for ours, theirs in zip((table, always, tails), compiled, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    for r, count in enumerate(rows.tolist()):
        of_row = blocks[r].long()[torch.arange(count) // block] * block + torch.arange(count) % block
        near = [int(place) for place in always[r] if place >= 0]
        found = [torch.arange(place * page, (place + 1) * page) for place in near]
        found[-1] = found[-1][: int(tails[r])]
        near_rows = torch.cat(found)
        far_rows = (table[r][table[r] >= 0, None] * unit + torch.arange(unit)).flatten().long()
        together = torch.cat([near_rows, far_rows])
        assert torch.equal(together.sort().values, of_row.sort().values)
        assert torch.isin(of_row[:sink], near_rows).all()
        assert torch.isin(of_row[max(count - window, 0) :], near_rows).all()


def test_entries_are_due_once_and_again_where_rows_were_written() -> None:
    made = np.zeros(64, np.bool_)
    rows, blocks = np.array([300, 40, 129], np.int32), np.array([[5, 2, 7], [0, 0, 0], [5, 1, 0]], np.int32)

    def due(above: int) -> list[int]:
        places, first = cpu_tables.due(rows, blocks, above, 32, 128, made)
        at = {5: 0, 2: 128, 7: 256, 0: 0}  # rows before each block
        assert first.tolist() == [at[place // 4] + place % 4 * 32 for place in places.tolist()]
        return sorted(places.tolist())

    # 9 whole entries of the first, in blocks 5, 2 and 7; the third shares block 5, and its second block is not whole.
    assert due(200) == [8, 9, 10, 11, 20, 21, 22, 23, 28]
    assert due(100) == [] == due(200)
    made[[9, 20]] = False
    assert due(100) == [9, 20]
    rows[1] = 64
    assert due(63) == [0, 1]
