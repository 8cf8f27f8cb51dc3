"""The law by which processes share the heads of a layer: who does not compare heads chooses for each as if alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, decode
from sparseattn.core.context import Heads
from sparseattn.selectors.abilities import ComparesHeads, FollowsLayers
from tests.cases import CASES, Case, attention, missing

PROMPT, STEPS, HEADS = 150, 4, 2
READS_ALL = {"locret"}  # its network reads all heads of a token


def outputs(case: Case, which: slice) -> Tensor:
    """`[steps,1,H,G,D]` of some heads, in a cache that is shown these alone."""
    selector = case.make()
    own = tuple(range(*which.indices(HEADS)))
    if len(own) < HEADS:
        selector.bind(replace(selector.layer_context, heads=Heads(own, HEADS)))
    cache = KVCache(selector, sink=3, window=6, seal=selector.unit)
    queries, keys, values = (part[:, which] for part in attention(1, HEADS, 3, PROMPT + STEPS, 16))
    cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT], queries[:, :, :, :PROMPT])
    outs = []
    for t in range(PROMPT, PROMPT + STEPS):
        cache.append(keys[:, :, t, None], values[:, :, t, None], queries[:, :, :, t, None])
        outs.append(decode(queries[:, :, :, t], cache, 40))
    return torch.stack(outs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_head_that_is_alone_gets_what_it_gets_beside_others(case: Case) -> None:
    if why := missing(case):
        pytest.skip(str(why))
    selector = case.make()
    if selector.find(FollowsLayers) or case.name in READS_ALL:
        with pytest.raises(ValueError, match=r"for all of its KV heads|reads all 2 KV heads"):
            outputs(case, slice(0, 1))
        return
    together = outputs(case, slice(0, HEADS))
    alone = torch.cat([outputs(case, slice(head, head + 1)) for head in range(HEADS)], 2)
    far = float((together - alone).abs().max())
    assert (far > 1e-3) if selector.find(ComparesHeads) else (far < 1e-5)
