"""Views of methods of 2025 and 2026: what their papers find, and how they stand to keys of few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.markdown import bullets, ticked
from scripts.evidence.views_rivals import compared, holds, listed
from scripts.evidence.views_traces import Measured, spec

Record: TypeAlias = "Mapping[str, Any]"

ROWS, BYTES = "attended", "bytes_share"
EQUAL = {ROWS: "rows attended", BYTES: "bytes read"}
# (method, whom its paper finds it better than, at equal what, and in whose words)
CLAIMS = (
    ("RocketKV", ("Quest", "SparQ"), BYTES, "bounds over few channels are nearer than Quest's or SparQ's alone"),
    ("ParisKV", ("MagicPIG", "PQCache"), ROWS, "collisions and codes find more of the best rows than these"),
)
BESIDE = "LowBit"


def findings(record: Record) -> str:
    """What each paper finds of its method, what is seen here, and how it stands to keys of few bits."""
    found = Measured(record)
    items = []
    for method, others, cost, claim in CLAIMS:
        mine = _forms(found, method)
        rivals = [label for other in others for label in _forms(found, other)]
        every = [compared(found, label, other, cost) for label in mine for other in rivals]
        if every:
            items.append(
                f"The paper of {ticked(method.lower())}: {claim}. At equal {EQUAL[cost]} "
                f"{listed([words for words, _ in every])}. That {holds(every, 'better')}."
            )
        for equal, words in EQUAL.items():
            beside = [compared(found, label, BESIDE, equal)[0] for label in mine] if BESIDE in found.labels() else []
            if beside:
                items.append(f"Beside {ticked(spec(BESIDE))}, at equal {words} {listed(beside)}.")
    return bullets(*items)


def _forms(found: Measured, method: str) -> Sequence[str]:
    """The labels of a method, whatever its arguments."""
    return [label for label in found.labels() if label.partition("(")[0] == method]
