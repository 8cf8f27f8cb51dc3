"""The processes of a job that `torchrun` started: one queue of work for all, and where they wait for each other.

All run the same program and meet in the same order: what they divide are items of a list that each of them can make,
and an item goes to whoever is free next, the costliest first. Nothing is sent but numbers, over the store by which
torchrun's processes find each other; what was found goes through files, so that it is there after the job has ended,
however that happened. A job that is started again with any number of processes goes on from these files.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

WAIT = 0.2  # seconds between two looks at what the others have done
LONG = datetime.timedelta(days=30)  # a rank may wait long for another's item


class JobStore(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0, in one step; returns the sum."""


class JobRanks:
    """The processes of one job.

    Args:
        rank: the number of this one, from 0.
        count: how many there are, 2 or more.
        store: what all of them reach.
    """

    def __init__(self, rank: int, count: int, store: JobStore) -> None:
        self.rank, self.count, self._store = rank, count, store
        self._queues = self._meetings = 0

    def __bool__(self) -> bool:
        return True

    @property
    def first(self) -> bool:
        """Whether it is the process that speaks for all."""
        return self.rank == 0

    def take(self, costs: Sequence[float]) -> Iterator[int]:
        """Yield the numbers of those items that are this process's: each item is one process's, the costliest first.

        Args:
            costs: of every item, in any unit; the same in all processes.
        """
        order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
        queue, self._queues = f"queue {self._queues}", self._queues + 1
        while (turn := self._store.add(queue, 1) - 1) < len(order):
            yield order[turn]

    def advance(self, steps: int = 1) -> int:
        """Add to what all of them have done since the last `meet`; returns that."""
        return self._store.add(f"done {self._meetings}", steps)

    def meet(self, waiting: Callable[[int], None] = lambda done: None) -> None:
        """Return once all processes have come here; `waiting` is called now and then with what `advance` counts."""
        name, met = f"meeting {self._meetings}", self._store.add(f"meeting {self._meetings}", 1)
        while met < self.count:
            waiting(self.advance(0))
            time.sleep(WAIT)
            met = self._store.add(name, 0)
        left = self._store.add(f"{name} left", 1)
        while self.first and left < self.count:  # its process may hold the store, which the others look at yet
            time.sleep(WAIT / 20)
            left = self._store.add(f"{name} left", 0)
        self._meetings += 1


def job_size() -> int:
    """Return how many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def job_rank() -> int:
    """Return the number of this process among those."""
    return int(os.environ.get("RANK", "0")) if job_size() > 1 else 0


def check_job(command: str, several: Sequence[str]) -> None:
    """Refuse a command that would do all of its work once in each process: ValueError, unless it is among `several`."""
    if job_size() > 1 and command not in several:
        raise ValueError(
            f"{command} takes one process, and torchrun has started {job_size()}: start it without torchrun, as "
            f"{', '.join(several)} alone divide their work"
        )


def of_job() -> JobRanks | None:
    """Return the processes that torchrun has started; None where this one is alone.

    Raises:
        ValueError: torchrun's other variables are missing.
    """
    if job_size() == 1:
        return None
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacking:
        raise ValueError(f"WORLD_SIZE={job_size()} is of torchrun, which sets {', '.join(lacking)} too: unset it")
    job: Any = next(rendezvous("env://", timeout=LONG))
    store, rank, count = job
    return JobRanks(rank, count, PrefixStore("sparseattn", store))


def of_model(ranks: JobRanks | None) -> int:
    """Return how many processes share a model's layers where a command was asked to have it so.

    Raises:
        ValueError: there is one process, or they are on several nodes.
    """
    if not ranks:
        raise ValueError(
            "--tensor-parallel is of several processes, each with its heads of the model: start the command with "
            "torchrun --nproc-per-node N -m sparseattn, N a divisor of the model's KV heads"
        )
    if (local := int(os.environ.get("LOCAL_WORLD_SIZE", ranks.count))) != ranks.count:
        raise ValueError(
            f"--tensor-parallel is of the processes of one node, and {local} of {ranks.count} are on this one: start "
            f"torchrun with --nnodes 1"
        )
    return ranks.count


def in_turn(ranks: JobRanks | None) -> contextlib.AbstractContextManager[None]:
    """Let the first process alone run the block before the others do: for what one makes and all find made."""
    return _in_turn(ranks) if ranks else contextlib.nullcontext()


@contextlib.contextmanager
def _in_turn(ranks: JobRanks) -> Iterator[None]:
    if not ranks.first:
        ranks.meet()
    yield
    if ranks.first:
        ranks.meet()
