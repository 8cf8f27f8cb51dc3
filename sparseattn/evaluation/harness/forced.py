"""Log-likelihoods of continuations through a sparse cache: the context is prefilled, what follows goes token by token.

A context that several continuations share, as in multiple choice, is prefilled once, and its index is built once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.activity import Activity
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.input_device import input_device
from sparseattn.models.sparse_cache import SparseCache


@dataclass(frozen=True)
class Forced:
    """One continuation, as tokens.

    Args:
        prefix: tokens that are prefilled densely; none, where the tail is as long as the context.
        fed: tokens that go through the sparse path one by one: the context's tail and all of the continuation but its
            last token, whose successor nobody asks for.
        scored: the continuation.
    """

    prefix: tuple[int, ...]
    fed: tuple[int, ...]
    scored: tuple[int, ...]

    @classmethod
    def of(cls, context: Sequence[int], continuation: Sequence[int], tail: int, longest: int) -> Forced:
        """Return a continuation, of whose context the last `tail` tokens, one at least, are fed.

        Args:
            context, continuation: at least one token each.
            tail: as said.
            longest: tokens that the model takes; what is beyond is cut from the left, as lm-eval does.
        """
        read = [*context, *continuation][-(longest + 1) :][:-1]
        begin = max(len(read) - (max(tail, 1) + len(continuation) - 1), 0)
        return cls(tuple(read[:begin]), tuple(read[begin:]), tuple(continuation))


def predicted(
    model: Any, empty: SparseCache, wanted: Sequence[Forced], batch: int
) -> Iterator[tuple[list[int], Tensor, Activity]]:
    """Yield, for every distinct prefix and fed tokens, who wanted them, and the logits `[n,V]` behind each fed token.

    Args:
        model: a causal LM.
        empty: a cache of it that holds nothing; it stays so.
        wanted: what to predict.
        batch: prefixes that are prefilled together, and sequences that are fed together.

    Yields:
        Numbers in `wanted`; logits; what ran since the last ones were yielded.
    """
    by_prefix: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for number, token in enumerate(wanted):
        by_prefix.setdefault(token.prefix, {}).setdefault(token.fed, []).append(number)
    # Long ones first, as lm-eval has it: what does not fit into memory fails at once. Those without any come last.
    for prefixes in _batches(sorted(by_prefix, key=len, reverse=True), batch):
        ran = Activity()
        cache, mask = _prefilled(model, empty, prefixes)
        ran += cache.activity()
        rows = [(row, fed) for row, prefix in enumerate(prefixes) for fed in by_prefix[prefix]]
        rows.sort(key=lambda each: len(each[1]), reverse=True)
        for start in range(0, len(rows), batch):
            together = rows[start : start + batch]
            which = torch.tensor([row for row, _ in together])
            own = cache.clone()
            if prefixes[0] and which.tolist() != list(range(len(prefixes))):
                own.batch_select_indices(which)
            logits = _fed(model, own, mask[which.to(mask.device)], [fed for _, fed in together])
            ran += own.activity()
            for (row, fed), behind in zip(together, logits, strict=True):
                yield by_prefix[prefixes[row]][fed], behind[: len(fed)], ran
                ran = Activity()
            del own, logits


def _batches(prefixes: Sequence[tuple[int, ...]], batch: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Yield them in order; an empty prefix is not with others, whose padding it would be whole."""
    filled = [prefix for prefix in prefixes if prefix]
    for start in range(0, len(filled), batch):
        yield filled[start : start + batch]
    if len(filled) < len(prefixes):
        yield [()]


def _prefilled(model: Any, empty: SparseCache, prefixes: Sequence[tuple[int, ...]]) -> tuple[SparseCache, Tensor]:
    """Return a cache that holds the prefixes, padded on the left, and their mask `[B,T]`."""
    cache, longest = empty.clone(), max(map(len, prefixes))
    cache.sparse_from = longest
    rows = [[0] * (longest - len(prefix)) + list(prefix) for prefix in prefixes]
    device = input_device(model)
    ids = torch.tensor(rows, dtype=torch.long, device=device).view(len(prefixes), longest)
    lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    if longest:
        _forward(model, cache, ids, mask, 1)
        cache.seal()
    return cache, mask


def _fed(model: Any, cache: SparseCache, mask: Tensor, fed: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the logits `[B,n,V]` behind tokens that are fed, padded on the right."""
    longest, device = max(map(len, fed)), input_device(model)
    rows = [list(tokens) + [0] * (longest - len(tokens)) for tokens in fed]
    lengths = torch.tensor([len(tokens) for tokens in fed], device=device)
    own = (torch.arange(longest, device=device) < lengths[:, None]).long()
    return _forward(model, cache, torch.tensor(rows, device=device), torch.cat([mask, own], 1), 0)


def _forward(model: Any, cache: SparseCache, ids: Tensor, mask: Tensor, logits: int) -> Tensor:
    """Return the logits `[B,n,V]` behind the last `logits` tokens, behind all of them for 0."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=logits,
            **cache_argument(cache),
        )
    made: Tensor = out.logits
    return made
