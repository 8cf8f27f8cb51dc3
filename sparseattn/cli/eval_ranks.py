"""`eval` by several processes: each takes prompts from one queue, the longest first, and measures all that is wanted of
them."""

from __future__ import annotations

import array
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sparseattn.cli.eval_sources import Source
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.tasks.engines import Engine
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import Records
from sparseattn.utils.ranks import JobRanks


@dataclass(frozen=True, eq=False)
class _KnownPrompt:
    """A prompt whose tokens lie in 4 bytes each, as all prompts are held to begin with the longest."""

    prompt: Prompt
    context: array.array[int]

    @classmethod
    def of(cls, prompt: Prompt) -> _KnownPrompt:
        return cls(replace(prompt, context=[]), array.array("i", prompt.context))

    def whole(self) -> Prompt:
        return replace(self.prompt, context=self.context.tolist())

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.prompt.question)


def held(sources: Sequence[Source]) -> list[Source]:
    """Return sources whose prompts are made once, now."""
    return [
        Source(source.task, source.count, _Made([_KnownPrompt.of(prompt) for prompt in source.make()]))
        for source in sources
    ]


@dataclass(frozen=True, eq=False)
class _Made:
    prompts: Sequence[_KnownPrompt]

    def __call__(self) -> Iterator[Prompt]:
        return (prompt.whole() for prompt in self.prompts)


def share(ranks: JobRanks, sources: Sequence[Source], engine: Engine, records: Records) -> None:
    """Measure the prompts that this process takes, and return once all processes have measured theirs.

    Args:
        ranks: the processes.
        sources: of `held`.
        engine: of one pass, in this process.
        records: what is there already, and where new ones go: each process's own part.
    """
    (each,) = engine.passes
    prompts = [prompt for source in sources if isinstance(source.make, _Made) for prompt in source.make.prompts]
    made_by = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    with progress_bar() as bar:
        task = bar.add_task(f"prompts, {ranks.count} processes", total=len(prompts))
        for place in ranks.take([prompt.tokens for prompt in prompts]):
            prompt = prompts[place].whole()
            if any(key not in records.found for key in prompt.keys(engine.protocols, each.compared)):
                for record in each.measure([prompt], records.found):
                    records.add({**record, **made_by})
            bar.update(task, completed=ranks.advance())
        ranks.meet(lambda done: bar.update(task, completed=done))
