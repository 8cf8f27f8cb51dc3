"""The pages that an engine reads are those that a `KVCache` chooses over the same keys."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import LAYERS, SPARSE, ask, check_counts, engine, llama, prompts, switched
from torch import Tensor

from sparseattn import KVCache, make_selector
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, BoundedPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks, attend_bounded
from sparseattn.kernels.page_bounds.dispatch import page_scores_at
from sparseattn.selectors.pages.base import Entries, PageSelector

pytest.importorskip("numba")
from sparseattn.kernels.attend_vllm_blocks import cpu as attend_vllm_blocks_cpu
from sparseattn.serving.vllm import cpu, page_index

BUDGET, WINDOW = 96, 40
LENGTHS, TOKENS = (500, 260, 390), (20, 20, 6)


class Means(PageSelector):
    """By the product of the query with a page's mean key. Entries are of two pages."""

    entry_names = ("means",)

    def __init__(self, page: int = 32) -> None:
        super().__init__(page, "sum")

    @property
    def unit(self) -> int:
        return 2 * self.page

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {"means": keys.unflatten(2, (-1, 2, self.page)).mean(4)}  # [B,H,E,2,D]

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        found = query.sum(2, keepdim=True) @ entries["means"].flatten(2, 3).mT
        return found[:, :, 0].float().masked_fill(~real.repeat_interleave(2, 1)[:, None], -torch.inf)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What sparse layers read, for each request and step: the kernel's own lists, and the request's keys."""
    seen: list[dict[str, Any]] = []
    kernel, forward = attend_vllm_blocks_cpu._attend, cpu.SparseCPUImpl.forward
    names = list(inspect.signature(kernel.py_func).parameters)
    ran: list[dict[str, Any]] = []

    def watched(*given: Any) -> None:
        kernel(*given)
        read = dict(zip(names, given, strict=True))
        always, _, table, _ = read["tables"]
        parts = {"always": always, "table": table, "ids": read["ids"]}
        ran.append({name: torch.from_numpy(part.copy()) for name, part in parts.items()})

    def bounded(query: Tensor, out: Tensor, layer: BoundedPages, pages: Any, count: Any, scale: float) -> None:
        """Also in two calls, the second of which is watched."""
        attend_bounded(query, out, layer, pages, count, scale)
        voted, own = layer.voted, out.clone()
        asked = query[pages.tokens].unflatten(1, (layer.cache.packed.shape[1], -1))
        scores = page_scores_at(asked, voted.bounds, pages.table, voted.group, temperature=voted.temperature)
        attend_blocks(query, own, layer.cache, pages, scores, count, scale)
        assert torch.equal(own[pages.tokens], out[pages.tokens])

    def forwarded(impl: Any, layer: Any, query: Any, key: Any, value: Any, held: Any, metadata: Any, **out: Any) -> Any:
        ran.clear()
        done = forward(impl, layer, query, key, value, held, metadata, **out)
        if ran:
            size, served = held.shape[2], metadata.served
            which = torch.searchsorted(metadata.query_start_loc[:-1].long(), served.tokens)
            chosen = ran[0]["ids"].view(served.count, -1, ran[0]["ids"].shape[-1])
            for r, request in enumerate(which.tolist()):
                rows, table = int(metadata.seq_lens[request]), metadata.block_table[request].long()
                keys = BlockCache(held, impl.packing).keys(table[: -(-rows // size)], size)  # [blocks,H,size,D]
                seen.append({
                    "layer": layer.layer_name, "rows": rows, "blocks": table, "size": size, "page": impl.page,
                    "unit": impl.unit, "query": query[served.tokens[r]].unflatten(0, (keys.shape[1], -1)).clone(),
                    "keys": keys.transpose(0, 1).flatten(1, 2)[:, :rows].clone(), "ids": chosen[r],
                    "always": ran[0]["always"][r], "table": ran[0]["table"][r],
                })  # fmt: skip
        return done

    monkeypatch.setattr(attend_vllm_blocks_cpu, "_attend", watched)
    monkeypatch.setattr(page_index, "attend_bounded", bounded)
    monkeypatch.setattr(cpu.SparseCPUImpl, "forward", forwarded)
    return seen


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose settings are switched."""
    with engine(llama(tmp_path_factory.mktemp("llama")), {**SPARSE, "selector": "test_pages:Means"}) as llm:
        yield llm


@pytest.mark.parametrize("selector", ["quest", "quest:page=32,group=each", "lowbit:page=16", "test_pages:Means"])
def test_pages_are_those_that_a_cache_of_the_same_keys_chooses(
    served: Any, calls: list[dict[str, Any]], selector: str
) -> None:
    """With a sink of one entry, which is where the cache begins to count too."""
    unit = make_selector(selector).unit
    settings = {**SPARSE, "selector": selector, "budget": BUDGET, "sink": unit, "window": WINDOW}
    switched(served, settings)
    calls.clear()  # those of the self-test
    answer = ask(served, prompts(*LENGTHS), TOKENS)
    check_counts(answer, full=False)
    assert len(calls) == answer.stats.sparse_steps
    assert len({call["layer"] for call in calls}) == LAYERS - 1
    assert {call["rows"] for call in calls} >= {501, 519, 261, 279, 391, 395}
    read = 0
    for call in calls:
        cache = KVCache(make_selector(selector), sink=unit, window=WINDOW, seal=unit)
        cache.append(call["keys"][None], call["keys"][None])
        found = cache.select(call["query"][None], BUDGET)
        page, sealed = call["page"], unit + int(cache.sealed[0])
        pages = call["size"] // page

        def place(first: int, call: dict[str, Any] = call, page: int = page, pages: int = pages) -> int:
            """Of a page in the engine's cache, by the sequence's row that it begins with."""
            return int(call["blocks"][first // call["size"]]) * pages + first % call["size"] // page

        near = [*range(0, unit, page), *range(sealed, call["rows"], page)]
        assert [int(at) for at in call["always"] if at >= 0] == [place(first) for first in near]
        per = unit // page
        for head, ids in enumerate(call["ids"]):
            own = {int(call["table"][i // per]) * per + int(i) % per for i in ids if i >= 0}
            spans = zip(found.start[0, head].tolist(), found.length[0, head].tolist(), strict=True)
            rows = {unit + row for start, length in spans for row in range(start, start + length)}
            assert own == {place(row) for row in rows if row % page == 0}
            assert len(own) == min(BUDGET // page, (sealed - unit) // page)
            assert len(rows) == len(own) * page
        read += (len(near) + len(own)) * page - (-call["rows"] % page)
    assert answer.stats.rows_read == read
