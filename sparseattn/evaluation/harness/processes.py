"""lm-eval by several processes of torchrun: what each found is put together in the order of one process.

lm-eval deals documents by their number, i to process i modulo their count, and asks the model's class to bring what was
found to the first process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sparseattn.core.activity import Activity
from sparseattn.evaluation.harness.tally import KEY, Tally
from sparseattn.utils.ranks import JobRanks, in_turn


def gathered(part: Any, first: int = 0) -> list[Any] | None:
    """Return, in process `first`, what each process has found, by rank; None in others. All call it together."""
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == first else None
    dist.gather_object(part, every, dst=first)
    return every


def in_order(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples or the numbers of each task in the order of its documents.

    Args:
        parts: of each process, by task: samples, or lists of numbers by metric and filter; documents in their order.
    """
    return {task: _of_task([part[task] for part in parts]) for task in parts[0]}


def _of_task(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {name: dealt(part[name] for part in parts) for name in parts[0]}
    filters = dict.fromkeys(sample["filter"] for part in parts for sample in part)
    samples = ([[sample for sample in part if sample["filter"] == name] for part in parts] for name in filters)
    return [sample for each in samples for sample in dealt(each)]


def dealt(parts: Iterable[Sequence[Any]]) -> list[Any]:
    """Return what was dealt in turn, in its order."""
    nothing = object()
    rounds = itertools.zip_longest(*parts, fillvalue=nothing)
    return [item for each in rounds for item in each if item is not nothing]


def joined(tally: Tally) -> Tally:
    """Return, in the first process, the counts of all; in others their own. All of them call it together."""
    every = gathered((tally.ran, tally.earlier, tally.tails))
    return tally if every is None else tally.of_all(every)


def spread_responses(path: str, ranks: JobRanks | None, sharing: bool) -> None:
    """Give every process the responses that earlier runs have kept, by whatever number of processes.

    Args:
        path: of `--use_cache`; lm-eval keeps those of process N in PATH_rankN.db.
        ranks: the processes; None: one.
        sharing: whether they share the model, so that all have the same responses, of which the first's count.
    """
    own = Path(f"{path}_rank{ranks.rank if ranks else 0}.db")
    first = Path(f"{path}_rank0.db")
    with in_turn(ranks):
        if own == first:
            others = sorted(first.parent.glob(f"{first.name.removesuffix('0.db')}*.db"))
            _join(first, [other for other in others if other != first], sharing)
        elif first.is_file():
            _copy(first, own, with_counts=sharing)


def _join(first: Path, others: Sequence[Path], sharing: bool) -> None:
    """Move what lies in other files to the first one; counts are added up."""
    from sqlitedict import SqliteDict

    for other in others:
        if not sharing:
            with SqliteDict(str(first)) as into, SqliteDict(str(other), flag="r") as more:
                for key, value in more.items():
                    if key.startswith(KEY) and key in into:
                        value = (Activity.from_dict(into[key]) + Activity.from_dict(value)).to_dict()
                    into[key] = value
                into.commit()
        other.unlink()


def _copy(first: Path, own: Path, with_counts: bool) -> None:
    from sqlitedict import SqliteDict

    with SqliteDict(str(first), flag="r") as source, SqliteDict(str(own), flag="n") as into:
        for key, value in source.items():
            if with_counts or not key.startswith(KEY):
                into[key] = value
        into.commit()
