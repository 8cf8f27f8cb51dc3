"""Codes of rows in an engine's store: they rank as a cache of the same keys does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparseattn import KVCache
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.selectors.base import vote
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.query_metric import codes_of
from sparseattn.selectors.tokens.querypq import QueryPQ
from sparseattn.serving.vllm.block_codes import UNIT, BlockCodes
from sparseattn.serving.vllm.page_index import Store

HEADS, SIZE, ENTRIES = 2, 16, 3
ROPE = Rope.of(SIZE)


@pytest.fixture(scope="module", params=["rope", "plain"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(HEADS, 999, SIZE, generator=draw), torch.randn(HEADS, 2, 300, SIZE, generator=draw)
    codes = codes_of(keys, queries, None, 8, 4, 0)
    if request.param == "rope":
        codes["root"] = 3 * torch.randn(HEADS, SIZE, generator=draw)
    path = tmp_path_factory.mktemp("codes") / "codes.safetensors"
    Calibration("querypq", {0: codes}, ropes={0: ROPE}).save(path)
    return path


@pytest.mark.parametrize("firsts", [(0, 0), (64, 64), (32, 0)])
@pytest.mark.parametrize("group", ["softmax", "sum", "each"])
def test_rows_rank_as_in_a_cache_that_begins_at_the_same_position(
    file: Path, group: str, firsts: tuple[int, int]
) -> None:
    """Of sequences whose entries lie anywhere, and begin at the same position or at others."""
    draw, rows = torch.Generator().manual_seed(1), ENTRIES * UNIT
    keys = torch.randn(2, HEADS, rows, SIZE, generator=draw)
    query = 2 * torch.randn(2, HEADS, 2, SIZE, generator=draw)
    selector = BlockCodes(QueryPQ(8, artefact=str(file), group=group)).for_layer(LayerContext(0))
    store = Store(selector, 9, HEADS, SIZE, torch.float32, torch.device("cpu"))
    assert ("first" in store.entries) == selector.method.turning
    table = torch.tensor([[7, 2, 5], [1, 8, 3]], dtype=torch.int32)
    for places, own, first in zip(table.long(), keys, firsts, strict=True):
        at = first + UNIT * torch.arange(ENTRIES)
        store.update(places, own.unflatten(1, (ENTRIES, UNIT)).transpose(0, 1), at)
    scores, best = store.scores(query, table), store.best(query, table, 20)
    for b, first in enumerate(firsts):
        alone = QueryPQ(8, artefact=str(file), group=group).for_layer(LayerContext(0, rope=ROPE))
        cache = KVCache(alone, sink=0, window=0, seal=UNIT)
        cache.append(keys[b : b + 1], keys[b : b + 1], positions=(first + torch.arange(rows))[None])
        cache.seal()
        valid = torch.ones(1, rows, dtype=torch.bool)
        wanted = vote(cache.selector.logits(query[b : b + 1], valid), group)[0]
        torch.testing.assert_close(scores[b], wanted, rtol=1e-3, atol=1e-3)
        overlap = (best[b].long().sort().values[..., None] == wanted.topk(20).indices[:, None]).any(2).double().mean()
        assert float(overlap) > 0.9, "tables are rounded"


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("missed", [0.02, 0.05])
def test_what_codes_miss_most_of_each_entry_is_kept_with_it(known: bool, missed: float, tmp_path: Path) -> None:
    """One row of 32, or two; with the model's RoPE and in a layer whose RoPE the file does not know."""
    draw, rows = torch.Generator().manual_seed(0), ENTRIES * UNIT
    codes = codes_of(torch.randn(HEADS, 999, SIZE, generator=draw), None, None, 2, 4, 0)
    codes["root"] = torch.randn(HEADS, SIZE, generator=draw)
    path = tmp_path / "codes.safetensors"
    Calibration("querypq", {0: codes}, ropes={0: ROPE} if known else {}).save(path)
    keys, query = torch.randn(1, HEADS, rows, SIZE, generator=draw), torch.randn(1, HEADS, 2, SIZE, generator=draw)
    keys[:, :, 70] = 9 * query.mean(2) / query.mean(2).norm()
    table, found = torch.tensor([[7, 2, 5, -1]], dtype=torch.int32), {}

    def stored(share: float, group: str = "softmax") -> Store:
        selector = BlockCodes(QueryPQ(2, artefact=str(path), missed=share, group=group)).for_layer(LayerContext(0))
        store = Store(selector, 9, HEADS, SIZE, torch.float32, torch.device("cpu"))
        own = keys[0].unflatten(1, (ENTRIES, UNIT)).transpose(0, 1)
        store.update(table[0, :3].long(), own, 64 + UNIT * torch.arange(ENTRIES))
        store.update(table[0, :0].long(), own[:0], torch.arange(0))
        assert store.best(query, table[:, :0], 1).shape == (1, HEADS * (2 if group == "each" else 1), 0)
        return store

    for share in (0.0, missed):
        store = stored(share)
        found[share] = store.scores(query, table)
        assert bool(found[share][0, :, rows:].isneginf().all())
        if share:
            ids = store.selector._missed_at(store.entries, table).ids
            assert bool((ids == 70).any(2).all())
            assert int(ids.max()) < rows
            assert (ids >= 0).sum(2).tolist() == [[ENTRIES * (1 if share < 0.03 else 2)] * HEADS]
            assert store.best(query, table, 1).tolist() == [[[70], [70]]] == found[share].topk(1).indices.tolist()
    assert found[0.0].argmax(2).tolist() != [[70, 70]]
    logits, wanted = stored(missed, "each").scores(query, table)[0, :, 70], query[0] @ keys[0, :, 70, :, None] / 4
    torch.testing.assert_close(logits, wanted.flatten(), rtol=0.1, atol=0.1)
