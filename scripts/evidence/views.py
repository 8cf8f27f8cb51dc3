"""The views by name: what a block of a document makes of its records."""

from __future__ import annotations

from scripts.evidence import views_asked, views_kernels, views_speed, views_training
from scripts.evidence.documents import View

VIEWS: dict[str, View] = {
    "asked-short": views_asked.short,
    "asked-table": views_asked.long,
    "asked-rows": views_asked.stops,
    "asked-findings": views_asked.findings,
    "asked-facts": views_asked.facts,
    "kernels-table": views_kernels.table,
    "speed-short": views_speed.short,
    "speed-table": views_speed.long,
    "speed-notes": views_speed.notes,
    "speed-choosing": views_speed.choosing,
    "speed-building": views_speed.building,
    "scaling-words": views_speed.scaling,
    "generate-table": views_speed.generate,
    "generate-notes": views_speed.generate_notes,
    "training-time": views_training.time,
    "training-plan": views_training.plan,
    "training-saap": views_training.saap,
    "training-memory": views_training.memory,
    "training-heads": views_training.heads,
}
