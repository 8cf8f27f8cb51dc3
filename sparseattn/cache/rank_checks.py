"""What a cache whose rows are dealt to ranks cannot do, yet or at all: each a sentence, before a row comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from sparseattn.cache.ranks import Ranks
from sparseattn.codecs.base import RowCodec
from sparseattn.core.budget import Allowance
from sparseattn.selectors.abilities import (
    Evicts,
    FollowsChecks,
    FollowsLayers,
    HasTail,
    LearnsFromQueries,
    LooksAhead,
    Observes,
    ReadsRoundedKeys,
    WeighsUnsealed,
)
from sparseattn.selectors.base import Selector

# An ability -> why a method that has it, or a part of it, needs all rows in one process.
NEEDS_ALL = {
    LearnsFromQueries: "learns from what the prompt's queries give to all of its rows",
    Observes: "learns from what its rows weighed among all that were read",
    FollowsChecks: "learns from what full attention gives to all of its rows",
    Evicts: "drops rows by what they weigh among all",
    HasTail: "has rows that stand for all that is not read",
    WeighsUnsealed: "goes by what its rows weigh beside those that every query reads",
    LooksAhead: "goes by a query foreseen from the layer before",
    FollowsLayers: "reads what another layer chose",
    ReadsRoundedKeys: "reads the levels of rounded keys",
}


def check_dealable(selector: Selector) -> None:
    """Check that the rows of a selector can be dealt to processes, each of which is shown its own; else ValueError."""
    for part in selector.tree():
        if (why := part.why_not_dealt()) is not None:
            raise ValueError(f"the rows of {part!r} are not dealt to ranks, because {why}: leave group out")
    for ability, why in NEEDS_ALL.items():
        if any(ability is not LearnsFromQueries or any(part.queries_wanted) for part in _having(selector, ability)):
            raise ValueError(
                f"{selector!r} {why} ({ability.__name__}), so its rows are not dealt to ranks: take a method that goes "
                f"by a row's own key, such as quest or lowbit, or leave group out"
            )


def _having(selector: Selector, ability: type) -> list[Selector]:
    return [part for part in selector.tree() if part.has(ability)]


def check_plain(
    fixed: bool, sealed_device: torch.device | None, codec: RowCodec | None, indexes: object, exact: bool
) -> None:
    """Check for a cache of rows as they come, on one device, whose storage grows; else ValueError."""
    refused = {
        "fixed=True": fixed,
        f"sealed_device={str(sealed_device)!r}": sealed_device is not None,
        f"rows={str(codec)!r}": codec is not None,
        f"indexes={str(indexes)!r}": indexes is not None,
        "exact=True": exact,
    }
    if given := [text for text, there in refused.items() if there]:
        raise ValueError(
            f"a cache whose rows are dealt to ranks keeps them as they come, on its own device, in storage that grows: "
            f"leave out {', '.join(given)}, or group"
        )


def check_same_cache(ranks: Ranks, settings: Mapping[str, int], selector: Selector, keys: Tensor) -> None:
    """Check that the ranks' caches have the same settings and are given first rows of the same shape; else ValueError
    on each."""
    ranks.require_device(keys.device)
    batch, heads, rows, size = keys.shape
    shapes = {"the batch": batch, "KV heads": heads, "rows of the first append": rows, "head_dim": size}
    kinds = {"the selector": repr(selector), "dtype": str(keys.dtype), "share": f"{ranks.share} {ranks.slack}"}
    ranks.require_same(
        shapes | dict(settings) | {what: crc32(kind.encode()) for what, kind in kinds.items()}, keys.device
    )


def check_same_prompt(ranks: Ranks, counts: Sequence[int], device: torch.device) -> None:
    """Check that the ranks hold prompts of the same lengths when they first seal; else ValueError on each."""
    ranks.require_same({"rows": sum(counts), "their lengths' checksum": crc32(str(counts).encode())}, device)


def check_in_rows(allowed: Allowance) -> None:
    """Check for a budget in rows; else ValueError."""
    if allowed.mass is not None:
        raise ValueError(
            "a mass as budget would cut what each rank reads by what all ranks weigh, which they do not tell each "
            "other: give a budget in rows or as a share of the context, or leave group out"
        )
