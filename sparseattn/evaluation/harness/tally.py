"""What ran for each task of a run of lm-eval, and the refusal of scores for which nothing sparse ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sparseattn.core.activity import Activity, added
from sparseattn.evaluation.harness.tails import PromptTail

KEY = "sparseattn activity of "  # of a task, among lm-eval's responses, whose keys are hashes


class NothingSparse(ValueError):
    """A run of which no step was sparse: its scores would say nothing of the method."""


@dataclass(frozen=True)
class TailsFound:
    """The tails of a task's prompts.

    Args:
        least, most: tokens of the shortest and the longest.
        rules: by which they were found.
    """

    least: int
    most: int
    rules: frozenset[str]

    def joined(self, other: TailsFound) -> TailsFound:
        """Return those of both."""
        return TailsFound(min(self.least, other.least), max(self.most, other.most), self.rules | other.rules)

    def __str__(self) -> str:
        rules = ", ".join(sorted(self.rules))
        return f"{self.least} to {self.most} ({rules})" if self.least < self.most else f"{self.least} ({rules})"


Counts: TypeAlias = "tuple[Mapping[str, Activity], Mapping[str, Activity], Mapping[str, TailsFound]]"


class Tally:
    """Counts by task.

    Args:
        settings: how the run decodes, for its record.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.ran: dict[str, Activity] = {}
        self.tails: dict[str, TailsFound] = {}
        self.earlier: dict[str, Activity] = {}  # of the responses that were kept
        self._kept: MutableMapping[str, Any] | None = None
        self._task = ""

    def keep_in(self, kept: MutableMapping[str, Any] | None) -> None:
        """Keep counts among responses, so that those of a run that was killed are not lost."""
        self._kept = kept
        if kept is not None:
            for key in list(kept.keys()):
                if key.startswith(KEY):
                    self.earlier[key[len(KEY) :]] = Activity.from_dict(kept[key])

    def begin(self, task: str, tails: Iterable[PromptTail] = ()) -> None:
        """Begin to count for a task, whose prompts have these tails."""
        self._task = task
        self.ran.setdefault(task, Activity())
        if known := list(tails):
            least, most = (pick(tail.tokens for tail in known) for pick in (min, max))
            self.tails[task] = TailsFound(least, most, frozenset(tail.rule for tail in known))

    def add(self, ran: Activity) -> None:
        """Count for the task that has begun."""
        self.ran[self._task] += ran
        if self._kept is not None:
            self._kept[KEY + self._task] = self.of(self._task).to_dict()

    def of(self, task: str) -> Activity:
        """Return what ran for a task, in this run and for the responses that were kept."""
        return self.earlier.get(task, Activity()) + self.ran.get(task, Activity())

    @property
    def tasks(self) -> list[str]:
        """Those that were counted."""
        return list({**self.ran, **self.earlier})

    def of_all(self, every: Sequence[Counts]) -> Tally:
        """Return the counts of several processes, each of which has asked a part of every task."""
        whole = Tally(self.settings)
        for ran, earlier, tails in every:
            for into, counts in ((whole.ran, ran), (whole.earlier, earlier)):
                for task, count in counts.items():
                    into[task] = into.get(task, Activity()) + count
            for task, tail in tails.items():
                whole.tails[task] = tail.joined(whole.tails.get(task, tail))
        return whole

    def record(self) -> dict[str, Any]:
        """Return settings and counts as results have them.

        Raises:
            NothingSparse: no step of a task was sparse.
        """
        if idle := [task for task in self.tasks if not self.of(task).total.sparse_steps]:
            raise NothingSparse(
                f"no step of {', '.join(idle)} was sparse, so that no score is written: "
                f"{self.of(idle[0])}. A longer --tail, or more tokens of an answer, are decoded sparsely"
            )
        tasks = {
            task: {
                "tail_tokens": str(self.tails[task]) if task in self.tails else None,
                "of_kept_responses": self.earlier.get(task, Activity()).total.sparse_steps,
                **self.of(task).to_dict(),
            }
            for task in self.tasks
        }
        return {**self.settings, "tasks": tasks, "total": added(map(self.of, self.tasks)).total.to_dict()}
