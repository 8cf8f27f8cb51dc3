"""Twilight's top-p: the fewest proposed rows that hold p by keys of four bits."""

from __future__ import annotations

import pytest
import torch

from sparseattn import KVCache, LowBit, Quest, TopP, make_selector
from tests.cases import attention

B, H, G, D, N = 1, 2, 2, 32, 400


def filled(selector):
    queries, keys, values = attention(B, H, G, N, D)
    cache = KVCache(selector, sink=0, window=0, seal=32, check=True)
    cache.append(keys, values, queries)
    return cache, queries[:, :, :, -1]


@pytest.mark.parametrize("group", ["each", "softmax"])
@pytest.mark.parametrize("propose", [64, 1.0])
def test_the_fewest_of_the_proposed_rows_that_hold_p_are_read(propose: int | float, group: str) -> None:
    selector = TopP(Quest(16, "each" if group == "each" else "sum"), 0.7, propose, 16, group)
    cache, query = filled(selector)
    proposed = filled(Quest(16, "each" if group == "each" else "sum"))[0].select(query, 64 if propose == 64 else 400)
    fine = LowBit(4, 16, group="each")
    held, _ = filled(fine)
    chosen = cache.select(query, 400)
    held.select(query, 400)
    entries = {name: getattr(fine, name).visible for name in fine.entry_names}
    logits = fine.page_logits(query, entries, held.step().valid)  # [B,H,G,N]
    mask = proposed.mask(N).unflatten(1, (H, -1)).expand(-1, -1, G, -1)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    weights = weights.flatten(1, 2) if group == "each" else weights.mean(2)
    read = chosen.mask(N)
    assert bool((read <= proposed.mask(N).unflatten(1, (read.shape[1], -1)).any(2)).all())
    got = (weights * read).sum(-1)
    least = weights.masked_fill(~read, torch.inf).amin(-1)
    assert bool((got >= 0.7 - 1e-5).all())
    assert bool((got - least < 0.7).all()), "one row fewer holds too little"
    assert bool((chosen.attended < proposed.attended.min()).all())
    few = cache.select(query, 3)
    assert int(few.attended.max()) <= 3, "the budget is the most"
    proposal = int(proposed.scan_bytes.max())
    assert int(chosen.scan_bytes.min()) > proposal, "codes of four bits are read as well"


def test_its_arguments_are_checked_and_written() -> None:
    made = make_selector("topp:inner=[quest:page=8],p=.9,propose=2048")
    assert (made.p, made.propose, made.inner.page) == (0.9, 2048, 8)
    assert make_selector(repr(made)).label() == made.label() == "topp:inner=[quest:page=8],p=0.9,propose=2048"
    assert TopP().label() == "topp"
    for arguments in ({"p": 0.0}, {"p": 1.1}, {"propose": 0}, {"propose": 1.5}, {"propose": True}, {"group": "sum"}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            TopP(**arguments)
