"""The benchmark of models with an index of their own: its three ways compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.models.minimax_m3_vl")

from benchmarks import native_audit
from benchmarks.native import measure


@pytest.mark.slow
@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp"])
def test_ways_agree_over_rows_that_were_put_into_their_caches(family: str) -> None:
    with torch.no_grad():
        found = measure(family, rows=3000, steps=2)
    assert found["off"] < 1e-4
    assert 1500 < found["rows_read"] < 2100
    assert [way["way"] for way in found["ways"]] == ["eager", "sdpa", "native"]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(native_audit.MODELS))
def test_an_audit_has_every_figure(family: str, tmp_path: Path) -> None:
    found = native_audit.audited(family, tokens=256, last=8, steps=5, folder=tmp_path)
    methods = {"native", "exact", "lowbit", "quest", "querypq", "hata", "indexer"}
    at = {equal: [one for one in found["methods"] if one["equal"] == equal] for equal in ("rows", "bytes")}
    assert {one["method"].partition(":")[0] for one in at["rows"]} == methods
    own, exact = (next(one for one in at["rows"] if one["method"] == name) for name in ("native", "exact"))
    assert own["mass"] <= exact["mass"]
    assert exact["recall"] == 1
    for one in at["rows"]:
        assert one["rows"] <= native_audit.ROWS + 1.5
        assert one["kl"] >= 0
    assert all(one["bytes_share"] <= own["bytes_share"] + 1e-9 for one in at["bytes"])
    # The latents of GLM are less than what any budget of pages reads.
    few = {"native", "querypq"} if family == "glm_moe_dsa" else {"native", "querypq", "quest"}
    assert few <= {one["method"].partition(":")[0] for one in at["bytes"]}
    shared = dict(zip(found["layers"], found["share"], strict=True))
    if family == "glm_moe_dsa":
        assert shared[0][1] == 1  # layer 1 reads what layer 0 chose
