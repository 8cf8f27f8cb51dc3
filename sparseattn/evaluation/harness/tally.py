"""What ran for each task of a run of lm-eval, and the refusal of scores for which nothing sparse ran."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from sparseattn.core.activity import Activity, added
from sparseattn.evaluation.harness.tails import PromptTail

KEY = "sparseattn activity of "  # of a task, among lm-eval's responses, whose keys are hashes


class NothingSparse(ValueError):
    """A run of which no step was sparse: its scores would say nothing of the method."""


class Tally:
    """Counts by task.

    Args:
        settings: how the run decodes, for its record.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.ran: dict[str, Activity] = {}
        self.tails: dict[str, str] = {}
        self._earlier: dict[str, Activity] = {}
        self._kept: MutableMapping[str, Any] | None = None
        self._task = ""

    def keep_in(self, kept: MutableMapping[str, Any] | None) -> None:
        """Keep counts among responses, so that those of a run that was killed are not lost."""
        self._kept = kept
        if kept is not None:
            for key in list(kept.keys()):
                if key.startswith(KEY):
                    self._earlier[key[len(KEY) :]] = Activity.from_dict(kept[key])

    def begin(self, task: str, tails: Iterable[PromptTail] = ()) -> None:
        """Begin to count for a task, whose prompts have these tails."""
        self._task = task
        self.ran.setdefault(task, Activity())
        if found := list(tails):
            least, most = (pick(tail.tokens for tail in found) for pick in (min, max))
            rules = ", ".join(sorted({tail.rule for tail in found}))
            self.tails[task] = f"{least} to {most} ({rules})" if least < most else f"{least} ({rules})"

    def add(self, ran: Activity) -> None:
        """Count for the task that has begun."""
        self.ran[self._task] += ran
        if self._kept is not None:
            self._kept[KEY + self._task] = self.of(self._task).to_dict()

    def of(self, task: str) -> Activity:
        """Return what ran for a task, in this run and for the responses that were kept."""
        return self._earlier.get(task, Activity()) + self.ran.get(task, Activity())

    @property
    def tasks(self) -> list[str]:
        """Those that were counted."""
        return list({**self.ran, **self._earlier})

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
                "tail_tokens": self.tails.get(task),
                "of_kept_responses": self._earlier.get(task, Activity()).total.sparse_steps,
                **self.of(task).to_dict(),
            }
            for task in self.tasks
        }
        return {**self.settings, "tasks": tasks, "total": added(map(self.of, self.tasks)).total.to_dict()}
