"""What `machine --ranks` shows: a rank's part of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

from sparseattn.cost_model.rank_steps import Dealt, RankStep
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table


def link_line(dealt: Dealt) -> str:
    """Return what the link is."""
    link = dealt.link
    return f"Link: {link.name}, {link.bandwidth / 1e9:,.3g} GB/s, {1e6 * link.latency:.3g} us a message ({link.source})"


def rank_table(dealt: Dealt, steps: Sequence[RankStep], budget: str, exact: bool) -> Table:
    """Return a row for each method: what one rank keeps, reads and sends, and what its attention takes."""
    work, how = dealt.work, "the best of all" if exact else "the best of each"
    out = Table(
        f"Predicted attention of all layers, without weights, at one of {dealt.ranks:,} ranks: {work.model.name}, "
        f"{work.context:,} tokens, batch {work.batch}, budget {budget}, {how}",
        [
            Column.text("method"),
            Column("KV GB", Format(2, 1e-9)),
            Column("index GB", Format(2, 1e-9)),
            Column("read MB", Format(1, 1e-6)),
            Column("sent MB", Format(2, 1e-6)),
            Column("attention ms", Format(2, 1e3)),
            Column("link ms", Format(2, 1e3)),
            Column("step ms", Format(2, 1e3)),
        ],
    )
    for step in steps:
        if not step.reason:
            figures = step.kv, step.index, step.read, step.sent, step.attention, step.link, step.seconds
            out.add(step.method, *figures)
    notes = [f"There is no prediction for {step.method}: {step.reason}" for step in steps if step.reason]
    memory = work.machine.memory
    if memory is not None and steps[0].kv + work.model.weights.total > memory:
        notes.append("Its rows and the model's weights do not fit the memory of a rank.")
    out.note = "\n".join(notes)
    return out
