"""What the processes of `test_ranks` do: lives of caches over ranks beside those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparseattn import KVCache, decode
from sparseattn.cache.ranks import Ranks
from sparseattn.core.rank_traffic import traffic
from tests.cases import CASES, attention, full
from tests.ranks import main

CASE = {case.name: case for case in CASES}
PROMPT, LENGTHS, STEPS, BUDGET = 192, (192, 131, 70), 24, 64
SHAPE = 3, 2, 3, 16  # B, H, G, D


def rows() -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, group, size = SHAPE
    return attention(batch, heads, group, PROMPT + STEPS, size)


def prefill(caches: list[KVCache], queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """In three chunks, the second and third sequence padded on the left."""
    at = torch.arange(PROMPT) - torch.tensor([[PROMPT - length] for length in LENGTHS])
    for chunk in (slice(0, 100), slice(100, 101), slice(101, PROMPT)):
        for cache in caches:
            cache.append(keys[:, :, chunk], values[:, :, chunk], queries[:, :, :, chunk], at[:, chunk])


def caches(make: Callable[[], Any], ranks: Ranks) -> list[KVCache]:
    """Of one process, and over the ranks."""
    settings = {"sink": 3, "window": 6, "rollback": 2, "check": True}
    unit = make().unit
    return [KVCache(make(), seal=unit, **settings, group=group) for group in (None, ranks)]


def summed(ranks: Ranks) -> Ranks:
    """As many ranks would: they sum outputs."""
    ranks.gathered = 0
    return ranks


def exact(name: str, ranks: Ranks) -> dict[str, Any]:
    """A life with later seals, `crop`, `reorder` and a `clone`: how far its outputs are from one process's."""
    queries, keys, values = rows()
    both = caches(CASE[name].make, ranks)
    prefill(both, queries, keys, values)
    far, predicted = 0.0, 0
    for step in range(STEPS):
        if step == 17:
            order = torch.tensor([1, 0, 0])
            both = [cache.clone() for cache in both]
            for cache in both:
                cache.reorder(order)
        for cache in both:
            cache.append(*(part[:, :, PROMPT + step, None] for part in (keys, values)))
            if step == 9:
                cache.crop(2)
        out, expected = (decode(queries[:, :, :, PROMPT + step], cache, BUDGET) for cache in reversed(both))
        far = max(far, apart(out, expected))
        predicted += sent(both[1], ranks).sent
    counted = sum(size for purpose, size in ranks.sent.items() if purpose != "checks")
    return {"far": far, "counted": counted, "predicted": predicted, "sealed": both[1].stored.zones.here}


def apart(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).abs().max() / expected.abs().max())


def sent(cache: KVCache, ranks: Ranks) -> Any:
    selector: Any = cache.selector
    most = cache.stored.deal.most(max(cache.stored.zones.sealed)) // selector.page
    slots = min(BUDGET // selector.page, most) if selector.uses_budget else 0
    return traffic(ranks.size, SHAPE, slots=slots, group=selector.group, gathered=ranks.gathered)


def union(name: str, ranks: Ranks) -> dict[str, Any]:
    """Without a limit every rank reads all of its rows: how far the outputs are from full attention."""
    make = CASE[name].exhaustive
    assert make is not None
    queries, keys, values = (part[:1] for part in rows())
    cache = KVCache(make(), sink=3, window=6, seal=make().unit, group=Ranks(ranks.group, "union"), check=True)
    cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT])
    far, read = 0.0, 0
    for t in range(PROMPT, PROMPT + STEPS, 3):
        cache.append(keys[:, :, t, None], values[:, :, t, None])
        seen = [*range(PROMPT), *range(PROMPT, t + 1, 3)]
        out = decode(queries[:, :, :, t], cache, None)
        far = max(far, apart(out, full(queries[:, :, :, t], keys[:, :, seen], values[:, :, seen])))
    assert cache.search.latest is not None
    decode(queries[:, :, :, t], cache, BUDGET)
    read = int(cache.search.latest.attended.max())
    return {"far": far, "read": read, "sent": dict(cache.ranks.sent) if cache.ranks else {}}


def refused(ranks: Ranks) -> dict[str, Any]:
    """What ranks that differ are told, each of them."""
    found = {}
    for what in ("rows", "window", "lengths"):
        other = int(ranks.rank == ranks.size - 1)
        keys = torch.randn(2, 2, 40 + other * (what == "rows"), 16)
        cache = KVCache("quest", window=4 + other * (what == "window"), group=ranks)
        at = torch.arange(40).repeat(2, 1) - torch.tensor([[0], [3 + other]]) if what == "lengths" else None
        try:
            cache.append(keys, keys, positions=at)
            cache.seal()
            found[what] = "nothing"
        except ValueError as error:
            found[what] = str(error)
    return found


def generated(name: str, ranks: Ranks) -> dict[str, Any]:
    """Tokens of a tiny model, of a padded batch and then of a second turn, in chunks and at once: as one process's."""
    from sparseattn.models.sparse_cache import SparseCache
    from tests.models.tiny import generate, padded, small

    found: dict[str, Any] = {}
    for how, options in {
        "whole": {},
        "chunks": {"prefill_chunk_size": 16},
        "lookup": {"prompt_lookup_num_tokens": 4},
    }.items():
        model, said = small("llama"), []
        inputs = padded((60,)) if how == "lookup" else padded()
        for group in (None, ranks):
            cache = SparseCache(model, name, 16, sink=2, window=4, seal=None, context_group=group)
            first, logits = generate(model, cache, inputs, **options)
            longer = torch.cat([first, first[:, -9:]], 1)
            mask = torch.cat(
                [inputs["attention_mask"], torch.ones(len(first), longer.shape[1] - inputs["input_ids"].shape[1])], 1
            )
            again, _ = generate(model, cache, {"input_ids": longer, "attention_mask": mask.long()})
            said.append((first, logits, again))
            cache.restore()
        (first, logits, again), (expected, of_one, more) = said[1], said[0]
        found[how] = bool(torch.equal(first, expected) and torch.equal(again, more))
        found[f"far {how}"] = float((logits - of_one).abs().max())
    return found


def drafted(name: str, ranks: Ranks) -> dict[str, Any]:
    """Drafts of a tiny model, with a choice each and with one a round: as one process's, which are full attention's."""
    from sparseattn.models.lossless import generate_lossless
    from sparseattn.models.sparse_cache import SparseCache
    from tests.models.tiny import padded, small

    found: dict[str, Any] = {}
    for how, options in {
        "each": {"draft": 3},
        "once": {"draft": 3, "choose_once": True},
        "auto": {"draft": "auto"},
    }.items():
        model, inputs = small("llama"), padded()
        asked = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 40, "do_sample": False}
        expected = model.generate(**{**inputs, **asked})
        with SparseCache(model, name, 16, sink=2, window=4, seal=None, context_group=ranks) as cache:
            out = generate_lossless(model, inputs["input_ids"], cache=cache, **options, **asked)
            found[how] = bool(torch.equal(out.sequences, expected))
            found[f"{how} rounds"] = out.stats.rounds
    return found


def clocks(ranks: Ranks) -> list[int]:
    """How many tokens this process drafts, whose clock says what that of no other does."""
    from sparseattn.models.drafts.length import AutoLength, Round
    from sparseattn.models.drafts.shared_clock import SharedLength

    length = SharedLength(AutoLength(1.0), [ranks.group], torch.device("cpu"))
    chosen = []
    for _ in range(20):
        drafts = length.next(1000)
        plain = 0.5 + ranks.rank
        length.observe(Round(drafts, [drafts], 0.02 * drafts * (1 + 20 * ranks.rank), plain, 0.8 * plain))
        chosen.append(drafts)
    return chosen


def lives(names: dict[str, list[str]], size: int) -> Iterator[tuple[str, Any]]:
    """What this process found, in every group of the first W ranks that it is of."""
    for ranks in range(1, size + 1):
        group = dist.new_group(list(range(ranks)))
        if dist.get_rank() >= ranks:
            continue
        for name in names["exact"]:
            yield f"exact {name} {ranks}", exact(name, Ranks(group))
        for name in names["exact"][:1]:
            yield f"exact {name} summed {ranks}", exact(name, summed(Ranks(group)))
        for name in names["union"]:
            yield f"union {name} {ranks}", union(name, Ranks(group))
        for name in names.get("generate", []):
            yield f"generate {name} {ranks}", generated(name, Ranks(group))
            yield f"drafts {name} {ranks}", drafted(name, Ranks(group))
        if ranks > 1:
            yield f"refused {ranks}", refused(Ranks(group))
            yield f"clocks {ranks}", {"chosen": clocks(Ranks(group))}


if __name__ == "__main__":
    main(lives)
