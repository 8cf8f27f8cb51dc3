"""Measures what `eval` was asked for, prompt by prompt, and keeps every record as soon as it is there."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from sparseattn.cli.common import progress_bar
from sparseattn.cli.eval_plan import Plan
from sparseattn.cli.eval_sources import Source
from sparseattn.environment import machine, versions
from sparseattn.tasks.agreement import AGREEMENT
from sparseattn.tasks.decoder import ModelDecoder
from sparseattn.tasks.records import Records
from sparseattn.tasks.run import measure
from sparseattn.tasks.tokens import Tokens


def measured(
    sources: Sequence[Source], plan: Plan, decoder: ModelDecoder, tokens: Tokens, records: Records
) -> Iterator[dict[str, Any]]:
    """Every record that was asked for, those that were there already among them, with a progress bar."""
    made_by = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    methods, protocols = plan.methods, plan.protocols
    cells = len(methods) * sum(source.count * (1 if source.task == AGREEMENT else len(protocols)) for source in sources)
    with progress_bar() as bar:
        task = bar.add_task("", total=cells)
        for source in sources:
            for number, prompt in enumerate(source.make(), 1):
                bar.update(task, description=f"{source.task} {number}/{source.count}, {prompt.tokens:,} tokens")
                keys = prompt.keys(protocols, methods)
                missing = [key for key in keys if key not in records.found]
                bar.advance(task, len(keys) - len(missing))
                if missing:
                    for record in measure(prompt, methods, protocols, decoder, tokens, records.found, decoder.ends):
                        records.add({**record, **made_by})
                        bar.advance(task)
                yield from (records.found[key] for key in keys)
