"""A prompt that is prefilled once and decoded by many methods."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import Budget
from sparseattn.models.attention_routing import name_of
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.errors import ModelError
from sparseattn.models.index_keys import KeepsIndex
from sparseattn.models.sparse_cache import BUDGET, Method, PerLayer, SparseCache
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.selectors.abilities import LearnsFromQueries
from sparseattn.selectors.baselines.window import Window


class Prefill:
    """A prompt prefilled densely once, to be decoded by many methods: each takes a copy of its keys and values.

        prompt = Prefill(model, input_ids)
        for name in ("quest", "exact"):
            cache = prompt.cache(name, budget=256)
            model.generate(longer_ids, cache=cache)

    Prepares the model, as `SparseCache` does.

    Args:
        model: as for `SparseCache`.
        input_ids: `[B,T]`.
        attention_mask: `[B,T]`, 0 for padding; None: no padding.
        chunk: tokens a forward pass; None: all in one.
        queries: keep the prompt's queries, G times the keys, for selectors that learn from them (`queries_share`,
            `last_queries`).

    Attributes:
        logits: `[B,V]` of the last token.
        tokens: T.
    """

    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        queries: bool = True,
    ) -> None:
        if input_ids.ndim != 2 or not input_ids.numel():
            raise ValueError(f"input_ids are [B,T], at least one token, got {list(input_ids.shape)}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"a chunk has at least 1 token, got {chunk}")
        self.tokens = input_ids.shape[1]
        self._cache = SparseCache(model, _KeptQueries(float(queries)), None, sink=0, window=0, sparse_from=self.tokens)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        for start in range(0, self.tokens, chunk or self.tokens):
            part = slice(start, start + (chunk or self.tokens))
            with torch.no_grad():
                out = model(
                    input_ids=input_ids[:, part],
                    attention_mask=mask[:, : part.stop],
                    position_ids=positions[:, part],
                    use_cache=True,
                    logits_to_keep=1,
                    **cache_argument(self._cache),
                )
        self.logits: Tensor = out.logits[:, -1]

    def cache(
        self, selector: Method | PerLayer | None = None, budget: Budget | PerLayer = BUDGET, **settings: Any
    ) -> SparseCache:
        """Return a `SparseCache(model, selector, budget, **settings)` that holds the prompt, nothing of it sealed yet.

        Raises:
            ValueError: what `SparseCache` refuses; a selector that learns from queries where they were not kept.
            ModelError: a layer with an index of the model's own that is to stay as it is.
        """
        made, source = SparseCache(self._cache.model, selector, budget, **settings), self._cache
        for index, (mine, prefilled) in enumerate(zip(made.layers, source.layers, strict=True)):
            if isinstance(mine, SparseLayer):
                mine.append_from(prefilled)
            elif isinstance(prefilled, KeepsIndex):
                raise ModelError(
                    f"layer {index} of {name_of(made.model)} has an index of its own, whose choice this prompt was "
                    f"prefilled without: it can be sparse by a selector, and not left as it is by dense_layers"
                )
            elif isinstance(prefilled, SparseLayer):
                mine.update(*_columns(prefilled.rows, source._real.real))
            else:
                made.layers[index] = copy.copy(prefilled)
        made._real = source._real.clone()
        return made

    def rows(self, layer: int) -> KVCache:
        """Return the prompt's rows in a layer that attends to the whole context, in order and none of them sealed."""
        return self._cache.sparse_layers[layer].rows

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of the prompt in layers that attend to the whole context."""
        return sum(sum(layer.rows.nbytes.values()) for layer in self._cache.sparse_layers.values())

    def __repr__(self) -> str:
        return f"Prefill({name_of(self._cache.model)}): {self.tokens} tokens"


class _KeptQueries(LearnsFromQueries, Window):
    """Never chooses: it makes the cache keep the queries of a prefill, for the selectors to come."""

    def __init__(self, queries_share: float) -> None:
        self.queries_share = queries_share


def _columns(rows: KVCache, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values `[B,H,T,D]`, padding included, of a cache without sink that has sealed nothing."""
    if real is None:
        return rows.keys, rows.values
    keys, values = (rows.keys.new_zeros(*rows.keys.shape[:2], real.shape[1], rows.keys.shape[3]) for _ in range(2))
    for b, count in enumerate(rows.lengths.tolist()):
        at = real[b].nonzero()[:, 0].to(keys.device)
        keys[b][:, at], values[b][:, at] = rows.keys[b, :, :count], rows.values[b, :, :count]
    return keys, values
