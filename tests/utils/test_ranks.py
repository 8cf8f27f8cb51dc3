"""Processes of one job: every item is one process's, the costliest first, and nobody goes on before all have come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparseattn.evaluation.tasks.jsonlines import LinesFile, json_object
from sparseattn.utils import ranks as job
from sparseattn.utils.ranks import JobRanks


class Numbers:
    """A store of numbers in this process."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.held[key] = self.held.get(key, 0) + amount
            return self.held[key]


def together(count: int, run: Callable[[JobRanks], None]) -> None:
    """Run it in `count` threads, each a process of one job."""
    store, failed = Numbers(), list[BaseException]()

    def one(rank: int) -> None:
        try:
            run(JobRanks(rank, count, store))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_item_is_one_processs_and_the_costliest_begin(count: int) -> None:
    costs = [random.Random(4).randrange(9) for _ in range(40)]
    queues: list[list[int]] = [[], []]

    def run(ranks: JobRanks) -> None:
        for taken in queues:
            for item in ranks.take(costs):
                taken.append(item)  # in the order in which they were handed out, but for threads that overtake
                time.sleep(0.0005 * costs[item])
                ranks.advance()
            done: list[int] = []
            ranks.meet(done.append)
            assert len(taken) == len(costs), "all have come"

    together(count, run)
    for taken in queues:
        assert sorted(taken) == list(range(len(costs)))
        begun = [costs[item] for item in taken]
        assert all(abs(begun.index(cost) - sorted(costs, reverse=True).index(cost)) < count for cost in set(costs))


def test_the_first_makes_what_the_others_find() -> None:
    made: list[int] = []

    def run(ranks: JobRanks) -> None:
        with job.in_turn(ranks):
            if ranks.first:
                time.sleep(0.05)
            made.append(ranks.rank)

    together(4, run)
    assert made[0] == 0
    with job.in_turn(None):
        made.append(9)
    assert made[-1] == 9


def test_a_job_is_known_by_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert job.of_job() is None
    job.check_job("report", ())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="sets RANK, MASTER_ADDR, MASTER_PORT too"):
        job.of_job()
    with pytest.raises(ValueError, match="report takes one process, and torchrun has started 4"):
        job.check_job("report", ("bench",))
    job.check_job("bench", ("bench",))


def test_parts_of_a_file_are_found_by_all_and_joined_by_one(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"

    def found(file: LinesFile) -> list[int]:
        lines: list[int] = []
        file.read(lambda line, number, where: lines.append(json_object(line)["n"]))
        return lines

    LinesFile(path).append({"n": 0})
    for rank in (1, 0):
        LinesFile(path, rank).append({"n": 10 + rank})
    with open(path.with_suffix(".rank1.jsonl"), "ab") as torn:
        torn.write(b'{"n": 99')  # as a process that was killed leaves it
    before = path.with_suffix(".rank1.jsonl").read_bytes()
    assert found(LinesFile(path, 0)) == [0, 10, 11]
    assert path.with_suffix(".rank1.jsonl").read_bytes() == before, "another's part, which may be written to"
    assert found(LinesFile(path, 1)) == [0, 10, 11]
    assert path.with_suffix(".rank1.jsonl").read_bytes() == before[: -len(b'{"n": 99')]
    LinesFile(path).join({"n": n} for n in (0, 10, 11))
    assert [*tmp_path.iterdir()] == [path]
    assert found(LinesFile(path)) == [0, 10, 11]
