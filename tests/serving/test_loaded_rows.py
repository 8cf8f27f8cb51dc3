"""Which entries hold rows that nobody saw written: of new requests, of preempted ones, of those that decode."""

from __future__ import annotations

import numpy as np

from sparseattn.serving.vllm.loaded_rows import LoadedRows

BLOCKS = np.array([[7, 3, 5], [2, 9, 0]], np.int32)


def test_entries_of_rows_that_a_request_comes_with_are_found_once() -> None:
    loaded = LoadedRows(unit=16, block=32)

    def places(new: list[int], rows: list[int], names: str = "ab") -> list[int]:
        return loaded.places(list(names), np.array(new), np.array(rows), BLOCKS[: len(names)]).tolist()

    assert places([40, 10], [40, 50]) == [4, 5, 18]  # of b 40 rows were there: its block 2, and half of block 9
    assert places([1, 14], [41, 64]) == []
    assert places([1], [42], "a") == []
    assert places([1, 1], [43, 66]) == [4, 5, 18, 19, 0], "one that was away is taken for a new one"


def test_rows_behind_known_ones_and_blocks_that_change_are_found() -> None:
    loaded = LoadedRows(unit=16, block=32)
    one = np.array([1])
    loaded.places(["a"], one * 20, one * 20, BLOCKS[:1])
    assert loaded.places(["a"], one, one * 70, BLOCKS[:1]).tolist() == [15, 6, 7, 10], "rows 20 to 69 came at once"
    assert loaded.places(["a"], one, one * 60, BLOCKS[:1]).tolist() == [], "drafts that were not taken"
    assert loaded.places(["a"], one, one * 61, BLOCKS[1:]).tolist() == [4, 5, 18, 19], "they lie elsewhere now"
