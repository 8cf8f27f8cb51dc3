"""Measure what `eval` compares, prompt by prompt, and keep every record as soon as it is there."""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from sparseattn.cli.eval_sources import Source
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.engines import Engine, Pass
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import Key, Records


def measured(sources: Sequence[Source], engine: Engine, records: Records) -> Generator[dict[str, Any], None, None]:
    """Yield every record that is wanted, those that were there already among them, in the order of the prompts and with
    a progress bar. All passes but the last say nothing before they are through. A record that was there names the file
    and the line that its prompt stands in now."""
    made_by = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    everything = [compared for each in engine.passes for compared in each.compared]
    asked_of = {source.task: 1 if source.task == AGREEMENT else len(engine.protocols) for source in sources}
    cells = len(everything) * sum(source.count * asked_of[source.task] for source in sources)
    # Of the records that are to be given out, as far as prompts were made: their keys, and where their prompts stand.
    coming: deque[tuple[Key, dict[str, Any]]] = deque()
    with progress_bar() as bar:
        task = bar.add_task("", total=cells)

        def unanswered(each: Pass) -> Iterator[Prompt]:
            """Yield the prompts of which a record is missing. A prompt that comes twice is handed over once."""
            handed_over: set[Key] = set()
            whose = f"{each.compared[0].label}: " if len(engine.passes) > 1 else ""
            for source in sources:
                for number, prompt in enumerate(source.make(), 1):
                    words = f"{whose}{source.task} {number}/{source.count}, {prompt.tokens:,} tokens"
                    bar.update(task, description=words)
                    keys = prompt.keys(engine.protocols, each.compared)
                    missing = {key for key in keys if key not in records.found and key not in handed_over}
                    bar.advance(task, len(keys) - len(missing))
                    handed_over |= missing
                    if each is engine.passes[-1]:
                        coming.extend((key, prompt.place) for key in prompt.keys(engine.protocols, everything))
                    if missing:
                        yield prompt

        for each in engine.passes:
            with contextlib.closing(each.measure(unanswered(each), records.found)) as new:
                for record in new:
                    records.add({**record, **made_by})
                    bar.advance(task)
                    while coming and coming[0][0] in records.found:
                        key, place = coming.popleft()
                        yield {**records.found[key], **place}
    yield from ({**records.found[key], **place} for key, place in coming)
