"""The views by name: what a block of a document makes of its records."""

from __future__ import annotations

from scripts.evidence import (
    views_agreement,
    views_asked,
    views_inspect,
    views_kernels,
    views_recall,
    views_speed,
    views_traces,
    views_training,
)
from scripts.evidence.documents import View
from scripts.evidence.pictures import PICTURES

VIEWS: dict[str, View] = {
    "agreement-short": views_agreement.short,
    "agreement-table": views_agreement.full,
    "agreement-perplexity": views_agreement.perplexity,
    "asked-short": views_asked.short,
    "asked-table": views_asked.long,
    "asked-rows": views_asked.stops,
    "asked-findings": views_asked.findings,
    "asked-facts": views_asked.facts,
    "asked-grid": views_asked.grid,
    "bench-table": views_traces.full,
    "bench-short": views_traces.short,
    "bench-layers": views_traces.layers,
    "bench-heads": views_traces.heads,
    "bench-changing": views_traces.changing,
    "demo-printed": views_traces.printed,
    "inspect-layers": views_inspect.by_layer,
    "inspect-short": views_inspect.short,
    "kernels-table": views_kernels.table,
    "recall-table": views_recall.on_trace,
    "recall-growing": views_recall.growing,
    "recall-synthetic": views_recall.synthetic,
    "speed-short": views_speed.short,
    "speed-table": views_speed.long,
    "speed-notes": views_speed.notes,
    "speed-choosing": views_speed.choosing,
    "speed-building": views_speed.building,
    "scaling-words": views_speed.scaling,
    "generate-table": views_speed.generate,
    "generate-notes": views_speed.generate_notes,
    "generate-parts": views_speed.generate_parts,
    "training-time": views_training.time,
    "training-plan": views_training.plan,
    "training-saap": views_training.saap,
    "training-memory": views_training.memory,
    "training-heads": views_training.heads,
    **{f"picture-{name}": one.line for name, one in PICTURES.items()},
}
