"""What is done to a model's cache between forward passes: tokens dropped or freed, sequences reordered, rows sealed."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from sparseattn.models.dense_rows import DenseRows
from sparseattn.models.passes import Passes
from sparseattn.models.real_tokens import RealTokens
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import Cache, DynamicCache
from sparseattn.selectors.abilities import Evicts


class EditedCache(Cache):
    """The part of `SparseCache` that no forward pass runs, but for what copies and loads it."""

    model: Any
    layers: list[Any]
    _passes: Passes
    _real: RealTokens
    dense_rows: DenseRows

    @property
    def sparse_layers(self) -> dict[int, SparseLayer]:
        """The layers that attend sparsely, by number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, SparseLayer)}

    @abstractmethod
    def _tokens(self) -> int:
        """Return the number of tokens taken in, padding included."""

    def seal(self) -> None:
        """Build now what the selectors build from a prompt, instead of at the first decoded token."""
        for layer in self.sparse_layers.values():
            for part in layer.parts:
                part.rows.seal()

    def compact(self) -> int:
        """Free the rows that selectors have dropped for good (`KVCache.compact`), in every layer where one does.

        Returns:
            Places freed, summed over layers and KV heads.

        Raises:
            ValueError: no layer's selector drops rows, or one cannot follow when they move.
        """
        parts = [part.rows for layer in self.sparse_layers.values() for part in layer.parts]
        evicting = [rows for rows in parts if rows.selector.find(Evicts)]
        if not evicting:
            raise ValueError("no layer's selector drops rows (evicts), so there are none to free")
        return sum(rows.compact() * rows.stored.sealed_keys.shape[1] for rows in evicting)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens: how many, negative or 0, or (before transformers 5.10 or so) how many to keep.

        After a pass that was cut short, by an error or Ctrl-C, what its layers hold in common is the most that is left:
        `crop(0)` goes back to that. What selectors observed in that pass stays observed.

        Raises:
            ValueError: they are sealed; see `rollback`. Nothing has changed.
            RuntimeError: a layer with a sliding window has not kept what comes before them (`activate_past_recording`);
                nothing has changed. Or of a pass that was cut short, a layer cannot go back: rows were being stored or
                sealed, or it keeps a state that does not go back.
        """
        self.dense_rows.let_go()
        if not self._passes.whole(self.layers):
            self._take_back(self._passes.tokens_after_crop(self.layers, tokens_to_remove))
            return
        tokens = self._tokens()
        tokens_to_remove = int(tokens_to_remove)  # older releases give a tensor
        drop = -tokens_to_remove if tokens_to_remove <= 0 else max(tokens - tokens_to_remove, 0)
        gone = self._real.count(tokens - drop, tokens)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                layer.check_crop(drop, gone)
            elif drop and getattr(layer, "is_sliding", False):
                _check_past(index, layer, drop)
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                layer.crop_rows(drop, gone)
            elif drop or getattr(layer, "record_past", False):  # 0: let go of the past that was kept for this
                layer.crop(-drop)
        self._real.crop(tokens - drop)

    def _take_back(self, tokens: int) -> None:
        """Go back to so many tokens, at most those that all layers hold whole."""
        if not tokens:
            self.reset()
            return
        self._passes.take_back(self.layers, tokens, self._real.count(0, tokens))
        self._real.crop(tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence b become what sequence `beam_idx[b]` was."""
        self.dense_rows.let_go()
        super().reorder_cache(beam_idx)
        self._real.take(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times."""
        self.dense_rows.let_go()
        super().batch_repeat_interleave(repeats)
        self._real.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`."""
        self.dense_rows.let_go()
        super().batch_select_indices(indices)
        self._real.take(indices)

    def reset(self) -> None:
        """Forget every token; the configuration and the counts stay."""
        fresh = DynamicCache(config=self.model.config).layers
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                layer.reset()
            else:
                self.layers[index] = fresh[index]
        self._real = RealTokens()
        self.dense_rows.let_go()
        self._passes.forget()


def _check_past(index: int, layer: Any, drop: int) -> None:
    """RuntimeError where a layer with a sliding window would lack rows once the newest `drop` are gone."""
    if not hasattr(layer, "record_past") or not layer.is_initialized:
        return  # of an older transformers, which says it itself
    held, window = layer.get_seq_length(), layer.sliding_window
    if held >= window and layer.keys.shape[2] < min(window - 1 + drop, held):
        raise RuntimeError(
            f"layer {index} has a sliding window of {window} tokens and has not kept those before it, so that {drop} "
            f"cannot be taken back: call activate_past_recording() before the tokens that may go"
        )
