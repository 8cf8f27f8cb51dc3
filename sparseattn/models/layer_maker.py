"""Make the sparse layers of a `SparseCache`, each tried on a few rows so that what does not fit raises at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.shown_rows import unit_of
from sparseattn.codecs.registry import as_codec
from sparseattn.core.budget import Budget
from sparseattn.core.context import LayerContext
from sparseattn.core.layer_choices import Board
from sparseattn.models import layer_checks as checks
from sparseattn.models.attention_layers import AttentionLayer
from sparseattn.models.exchanged_layer import ExchangedLayer, ExpandedLayer
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.tensor_parallel import HeadShare
from sparseattn.roles.role import Share
from sparseattn.roles.roles import Roles
from sparseattn.selectors.abilities import LooksAhead
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import as_selector


@dataclass(frozen=True, eq=False)
class LayerMaker:
    """What the sparse layers of a model have in common.

    Args:
        layers: the model's attention layers, by number.
        depth: layers of the model.
        methods: roles, or a selector or a mapping from layers to selectors.
        settings: arguments of every `KVCache`, all but the selector and `seal`.
        seal: as in `KVCache`; None: the unit of each selector.
        board: on which layers leave choices for those behind.
        impl: as in `attend`.
        here: which heads of every layer this process has.
    """

    layers: Mapping[int, AttentionLayer]
    depth: int
    methods: Roles | Any
    settings: Mapping[str, Any]
    seal: int | None
    board: Board
    impl: str | None
    here: HeadShare

    def layer(self, index: int, budget: Budget) -> SparseLayer:
        """Return a layer, with `budget` for those of its methods that have none of their own.

        Raises:
            ValueError, RuntimeError, ImportError: what does not fit, with the layer's number.
        """
        codec = as_codec(self.settings["rows"])
        try:
            parts = []
            for share in self._shares(index):
                selector = self._selector(share, index)
                seal = unit_of(selector, codec) if self.seal is None else self.seal
                parts.append(SparseHeads(share, KVCache(selector, seal=seal, **self.settings), budget))
                self._try_out(share, index, budget)
        except (ValueError, RuntimeError, ImportError) as error:
            kind = next(kind for kind in (ValueError, ImportError, RuntimeError) if isinstance(error, kind))
            raise kind(f"layer {index}: {error}") from error
        if (native := self.layers[index].index) is None:
            return SparseLayer(parts, self.impl)
        return ExpandedLayer(parts, self.impl) if native.latent else ExchangedLayer(parts, self.impl)

    def _shares(self, index: int) -> list[Share]:
        """Return which heads of a layer have which method."""
        if isinstance(self.methods, Roles):
            heads = self.layers[index].heads
            return self.here.of_shares(self.methods.shares(index, self.here.every(heads)), heads)
        return [Share(as_selector(checks.of_layer(self.methods, index)))]

    def _selector(self, share: Share, index: int) -> Selector:
        what = self.layers[index]
        self.here.check(share.selector, what.heads)
        heads = self.here.heads(what.heads)
        return share.fresh(LayerContext(index, self.depth, heads, what.rope, what.scale, board=self.board))

    def _try_out(self, share: Share, index: int, budget: Budget) -> None:
        """Decode once over a few random rows of the shape of a layer's heads."""
        what, selector = self.layers[index], self._selector(share, index)
        if selector.find(LooksAhead):
            raise ValueError(
                f"{selector} goes by the input of the layer before, which layers of a model are not told: evaluate "
                f"it on traces made with `sparseattn capture --ahead`, or make the layer dense"
            )
        heads = what.heads if share.heads is None else len(share.heads.which)
        selector.check_shape(heads, what.group, what.size)
        kept = {name: self.settings[name] for name in ("rows", "sealed_device")}
        count = max(unit_of(selector, as_codec(kept["rows"])), 16)
        draw = torch.Generator().manual_seed(0)
        shape = (1, heads, count, what.size)
        rows = torch.randn(2 + what.group, *shape, generator=draw).to(what.device, what.dtype)
        trial = KVCache(selector, sink=0, window=0, seal=count, check=True, **kept)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what so few rows lack
            trial.append(rows[0], rows[1], rows[2:].movedim(0, 2))
            decode(rows[2:, :, :, 0].movedim(0, 2), trial, share.budget(budget), scale=what.scale, impl=self.impl)
