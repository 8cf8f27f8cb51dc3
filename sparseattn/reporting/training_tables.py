"""The table of `train`: what SAAP's classifiers recover on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.evaluation.measure_table import FRACTION
from sparseattn.reporting.eval_records import mean
from sparseattn.reporting.table import Column, Table
from sparseattn.selectors.parameters.saap_artefact import Artefact

# How buckets are chosen -> head of its columns; 80 characters hold them all.
WAYS = {"classifier": "saap", "symmetric": "sym.", "oracle": "oracle", "exact": "exact"}


def validation(artefact: Artefact) -> Table:
    """Return the validation figures that an artefact carries, a row a layer and head."""
    figures: Sequence[Mapping[str, Any]] = artefact.meta["validation"]
    columns = [
        (way, str(share))
        for share in artefact.meta["recipe"]["shares"]
        for way in WAYS
        if way in figures[0]["recovered"]
    ]
    out = Table(
        "share of the far mass recovered on held-out prompts, by rows as a share of the context",
        [
            *(Column(name, wrap=False) for name in ("layer", "head")),
            *(Column(name, FRACTION, wrap=False) for name in ("far\nmass", "imb.")),
            *(Column(f"{WAYS[way]}\n{float(share):.3g}", FRACTION, wrap=False) for way, share in columns),
        ],
    )
    for figure in figures:
        recovered = (mean(figure["recovered"][way][share]) for way, share in columns)
        out.add(figure["layer"], figure["head"], mean(figure["far_mass"]), figure["train"]["imbalance"], *recovered)
    return out
