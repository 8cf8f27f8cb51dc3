"""What a step of vLLM reads by its tables, counted for each request and layer."""

from __future__ import annotations

import numpy as np
import torch

from sparseattn.core.activity import NAMES
from sparseattn.serving.vllm.served_requests import ServedRequests


def step(budgets: list[int] | None) -> ServedRequests:
    """Two requests of 640 and 320 rows, which may choose of 512 and 192 rows and read 100 and 90 beside them."""
    none = torch.zeros(2, 0, dtype=torch.int32)
    rows = np.array([640, 320])
    near, choice = np.array([100, 90]), np.array([512, 192])
    tails, tokens = torch.zeros(2, dtype=torch.int32), torch.arange(2)
    own = None if budgets is None else np.array(budgets)
    return ServedRequests(tokens, 2, True, none, none, tails, None, choice, near, rows, own)


def named(served: ServedRequests, page: int, pages: int) -> dict[str, int]:
    counts = served.counts(page, pages, unit=32, row=10, entry=3, once=7)
    return dict(zip(NAMES, counts.tolist(), strict=True))


def test_a_layer_counts_what_it_chooses_and_what_it_reads_in_any_case() -> None:
    counts = named(step(None), 32, 8)  # 256 rows, of which the second request has 192
    assert counts["rows_read"] == 256 + 192 + 190
    assert counts["bytes_read"] == 10 * (256 + 192 + 190) + 3 * (512 + 192) // 32 + 2 * 7
    assert (counts["rows_held"], counts["bytes_held"], counts["sparse_steps"]) == (960, 9600, 2)
    assert counts["dense_steps"] == counts["entries_made"] == 0


def test_a_budget_of_a_requests_own_is_counted_where_a_layer_chooses() -> None:
    served = step([64, -1])
    assert named(served, 32, 8)["rows_read"] == 64 + 192 + 190
    assert named(served, 32, 0)["rows_read"] == 190, "a window chooses nothing, whatever a request asks"


def test_layers_share_what_is_the_same() -> None:
    served = step(None)
    assert served.pages(32, 32) is served.pages(32, 32)
    assert served.pages(16, 32) is not served.pages(32, 32)
    assert named(served, 32, 8) == named(served, 32, 8) != named(served, 32, 4)
