"""The benchmark of models with an index of their own: its three ways compute the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl")

from benchmarks.native import measure


@pytest.mark.slow
@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp"])
def test_ways_agree_over_rows_that_were_put_into_their_caches(family: str) -> None:
    with torch.no_grad():
        found = measure(family, rows=3000, steps=2)
    assert found["off"] < 1e-4
    assert 1500 < found["rows_read"] < 2100
    assert [way["way"] for way in found["ways"]] == ["eager", "sdpa", "native"]
