"""What an engine's settings make of each layer of a model, without vLLM: the same lines as of a `SparseCache`."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparseattn.core.diagnosis import LayerDiagnosis
from sparseattn.models.diagnosis import diagnosed
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm.cuda_step import reads
from sparseattn.serving.vllm.page_tables import PageZones
from sparseattn.serving.vllm.settings import Settings


def diagnosed_for_vllm(whole: SparseCache, settings: Settings, length: int) -> list[LayerDiagnosis]:
    """Return a line for each layer.

    Args:
        whole: a cache in which every layer that can be sparse is.
        settings: of the engine.
        length: rows of the sequence.

    Raises:
        ValueError: a plan that says nothing of a layer.
    """
    lines, full = diagnosed(whole, length), 0
    for index, line in enumerate(lines):
        if index not in whole.sparse_layers:
            continue
        why = None
        if full < settings.dense_layers:
            why = "--dense-layers leaves it dense"
        elif settings.is_dense(index):
            why = "the plan leaves it dense"
        full += 1
        dense = replace(line, method=None, budget=None, sparse_from=None, rows_read=length, why_dense=why)
        lines[index] = dense if why is not None else _sparse(index, settings, length)
    return lines


def _sparse(index: int, settings: Settings, length: int) -> LayerDiagnosis:
    made, pages = settings.make(index), settings.pages(index)
    page, unit = settings.shape
    zones = PageZones(page, unit, unit, settings.sink, settings.window)
    first = zones.first * unit + settings.window + unit * (pages * page // unit + 1)  # rows with an entry too many
    read = length if length <= settings.above else reads(zones, torch.tensor([length]), pages)
    budget = str(pages * page) if isinstance(made, PageSelector) else None
    return LayerDiagnosis(index, made.label(), budget, max(first, settings.above + 1), read, length)
