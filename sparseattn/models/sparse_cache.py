"""Generate with a transformers model whose decoding attends sparsely: one object prepares the model and is its cache.

    cache = SparseCache(model, selector="quest", budget=1024, sink=4, window=64, dense_layers=2)
    model.generate(**inputs, cache=cache)

Nothing is patched on import, and no code of the model is replaced: its attention is routed through transformers'
`AttentionInterface`, and a frame around its `forward` tells which cache a pass was given and when that has ended.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sparseattn.cache.ranks import Ranks
from sparseattn.codecs.base import RowCodec
from sparseattn.core.activity import Activity, LayerActivity
from sparseattn.core.budget import Budget
from sparseattn.core.layer_choices import Board
from sparseattn.models import layer_checks as checks
from sparseattn.models import prompt_files
from sparseattn.models.attention_routing import name_of
from sparseattn.models.cache_edits import EditedCache
from sparseattn.models.dense_rows import DenseRows
from sparseattn.models.errors import ModelError
from sparseattn.models.layer_maker import LayerMaker
from sparseattn.models.model_hooks import leave, prepare, restore
from sparseattn.models.native_layer import native_layers
from sparseattn.models.passes import Passes, sparse_tokens
from sparseattn.models.real_tokens import RealTokens, check_generated
from sparseattn.models.sparse_layer import Run, SparseLayer, another_dtype
from sparseattn.models.stats import LayerStats, Stats
from sparseattn.models.transformers_classes import DynamicCache
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import Roles
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.native import NATIVE

__all__ = ["LayerStats", "SparseCache", "Stats", "restore"]

SINK, WINDOW = 4, 64  # rows that every query reads, where nothing else is said
SELECTOR, BUDGET = "quest", 1024
Method: TypeAlias = "Selector | str"
PerLayer: TypeAlias = "Mapping[int | str, Any]"


class SparseCache(EditedCache):
    """The cache of a model whose decoding reads, in each sparse layer, the rows that a selector chooses.

    Making one prepares the model: from then on it runs with a `SparseCache` or says that it cannot. As a context
    manager it gives the model back as it found it; `restore(model)` does so at any time.

    Prompts are prefilled densely, by the model's own attention. A token that comes alone is decoded sparsely, and so
    are drafts of prompt-lookup and assisted decoding (tokens behind the first whose logits are asked for), one by one.
    `sparse_from` decides otherwise: tokens before that position attend densely, later ones sparsely, one by one, even
    when they come in one forward pass, as the papers feed a question behind a long context.

    Args:
        model: a decoder-only model of transformers, in eval mode, with "sdpa", "eager" or flash attention.
        selector: a name (`make_selector`), a `Selector` whose configuration is used, or a mapping from layers to these,
            in which "default" stands for the others; None: quest, unless `roles` or `plan` name the methods.
        budget: rows beyond sink and window, per head: an int, a share of the context (float or "5%"), None for all, or
            a mapping as for `selector`. Roles that have a budget of their own keep it.
        roles: what each layer or each KV head does, instead of `selector`: a `Roles`, or the path of a file of them.
            They name every layer that attends to the whole context. A layer all of whose heads are dense stays as it
            is; one of several roles has a `KVCache` for each, whose dense heads read every row.
        plan: roles that were chosen for this model, instead: a `Plan`, or the path of its file, whose sink and window
            are taken.
        trusted: modules whose classes the files of `roles` and `plan` may name, such as `{"mine"}`: see `Roles.load`.
        sink, window, rollback, capacity, sealed_device, indexes, rows, check: as in `KVCache`. In speculative
            decoding `rollback` grows so that `window + rollback` is at least the number of drafts of a step.
        seal: as in `KVCache`; None: the unit of each selector, so that less than a unit of further dense rows flatters
            a comparison.
        dense_layers: how many of the first layers stay dense, or which, whatever their roles. Layers with a sliding
            window always stay dense. On CPUs both write each token's rows in place. Tokens decoded over all rows, or
            over a whole window, may be attended to by our compiled code, as torch has no fast one for them in 16
            bits; `impl="gather"` leaves them to the model.
        sparse_from: position from which tokens are decoded sparsely, padding counted: in a left-padded batch,
            questions of one length begin together. None: prompts are prefilled. May be set between forward passes.
        native: decode by the index that the model has of its own, in place of a selector: a token reads the rows that
            it chose and no others (`selector="native"` says the same). Prompts are prefilled by its choice too, so that
            outputs are the model's own. `dense_layers`, `sparse_from`, `capacity` and `impl` (of layers with keys and
            values) apply; every other argument that is not at its default is refused.
        context_group: processes that deal the rows of every sparse layer, as `group` of `KVCache`: each runs the same
            program, with its own copy of the model and the same inputs, and gets the same tokens. A prompt that comes
            in one pass is prefilled in full by each; behind it, and behind every chunk of a longer one, a layer keeps
            its rank's rows alone. `stats` and `activity` are of what this rank read.
        impl: as in `attend`.

    Raises:
        ModelError: a model whose attention cannot be routed or that does what sparse attention does not compute
            (soft-capped logits, learned sinks), or in which no layer is left to be sparse.
        ValueError: an unknown selector, a budget or artefact that does not fit a layer, a layer that is not there,
            roles of another number of layers or heads, a selector beside roles or a plan, a budget beside a plan that
            has no use for it, a plan for another model's weights or with another sink or window than the ones given.
            Every layer's selector is tried on a few rows, so that this comes before any work is lost.
    """

    def __init__(
        self,
        model: Any,
        selector: Method | PerLayer | None = None,
        budget: Budget | PerLayer = BUDGET,
        *,
        roles: Roles | str | os.PathLike[str] | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        trusted: Collection[str] = (),
        sink: int = SINK,
        window: int = WINDOW,
        seal: int | None = 1024,
        rollback: int = 0,
        dense_layers: int | Sequence[int] = 0,
        sparse_from: int | None = None,
        capacity: int = 0,
        sealed_device: torch.device | str | None = None,
        indexes: str | os.PathLike[str] | None = None,
        rows: RowCodec | str | None = None,
        context_group: dist.ProcessGroup | Ranks | None = None,
        impl: str | None = None,
        check: bool = False,
        native: bool = False,
    ) -> None:
        if native or selector == NATIVE:
            given: dict[str, Any] = {"budget": budget, "roles": roles, "plan": plan, "trusted": trusted, "sink": sink}
            given |= {"window": window, "seal": seal, "rollback": rollback, "check": check, "indexes": indexes}
            given |= {"sealed_device": sealed_device, "rows": rows, "context_group": context_group}
            given["selector"] = None if selector == NATIVE else selector
            checks.check_native(given, SparseCache.__init__)
            selector, budget = NATIVE, None
        if sparse_from is not None and (type(sparse_from) is not int or sparse_from < 0):
            raise ValueError(f"sparse_from is a position, 0 or more, or None, got {sparse_from!r}")
        self.roles = checks.loaded_roles(roles, selector, trusted)
        if plan is not None:
            self.roles = made = checks.planned(plan, model, self.roles or selector, trusted)
            if budget != BUDGET:
                checks.check_plan_budget(made, budget)
            if (sink, window) != (SINK, WINDOW):
                made.check_rows(sink, window)
            sink, window = made.sink, made.window
        self.model = model
        self.selector = SELECTOR if selector is None else selector
        self.budget, self.sparse_from = budget, sparse_from
        self.ranks = Ranks.of(context_group)
        self._settings: dict[str, Any] = {
            "sink": sink,
            "window": window,
            "rollback": rollback,
            "capacity": capacity,
            "sealed_device": sealed_device,
            "indexes": indexes,
            "rows": rows,
            "group": self.ranks,
            "check": check,
        }
        self._seal, self.impl = seal, impl
        self._dense_calls: Counter[int] = Counter()  # of layers that are not sparse
        self.dense_rows = DenseRows()  # of the same
        self._real = RealTokens()
        self.board = Board()  # on which layers leave choices for those behind
        self._dtype = model.dtype  # when the first row came
        self._batch = 0  # of the last pass
        self.prepared, self._prepared_before = prepare(model, self)
        try:
            layers = self._made_layers(dense_layers)
        except BaseException:
            leave(self, self._prepared_before)
            raise
        super().__init__(layers=layers)

    def _made_layers(self, dense_layers: int | Sequence[int]) -> list[Any]:
        """Return the model's layers, those that are to be sparse in place of transformers' own."""
        layers, prepared = DynamicCache(config=self.model.config).layers, self.prepared.layers
        self.here = here = checks.head_share(self.model, prepared, self.selector)
        self.dense_layers = self.dense_given = checks.dense_layers(
            dense_layers, len(layers)
        )  # roles may add to the first
        if self.roles is not None:
            self.dense_layers = checks.dense_by_roles(self.roles, self.model, layers, prepared, self.dense_layers, here)
        self._passes = Passes([index for index, what in prepared.items() if what.beyond is None])
        if self.selector == NATIVE:
            made = native_layers(self.model, prepared, self.dense_layers, self._settings["capacity"], self.impl)
            for index, layer in made.items():
                layers[index] = self._own(layer)
            return layers
        sparse = checks.sparse_layers(self.model, layers, prepared, self.dense_layers)
        for name, given in (("selector", self.selector), ("budget", self.budget)):
            checks.check_mapping(name, given, sparse)
        methods = self.selector if self.roles is None else self.roles
        maker = LayerMaker(prepared, len(layers), methods, self._settings, self._seal, self.board, self.impl, here)
        for index in sparse:
            layers[index] = self._own(maker.layer(index, checks.of_layer(self.budget, index)))
        return layers

    def _own(self, layer: SparseLayer) -> SparseLayer:
        """Tell a layer whose preparation it goes by, and return it."""
        layer.prepared = self.prepared
        return layer

    # -- what ran --------------------------------------------------------------------------------------------------

    @property
    def protocol(self) -> str:
        """How prompts are fed, for results: "prefilled", or "fed from N"."""
        return "prefilled" if self.sparse_from is None else f"fed from {self.sparse_from}"

    def stats(self) -> Stats:
        """Return what ran since the cache was made or cloned, by layer and in all."""
        layers = []
        for i, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                counts = layer.sparse_calls, layer.dense_calls, layer.mean_rows, layer.mean_context, layer.bytes_share
                layers.append(LayerStats(i, layer.label, *counts))
            else:
                layers.append(LayerStats(i, None, 0, self._dense_calls[i], 0.0, 0.0))
        return Stats(self.protocol, tuple(layers))

    def activity(self) -> Activity:
        """Return what ran since the cache was made or cloned, in counts that can be added up: see `Activity`."""
        return Activity(
            {
                i: layer.activity()
                if isinstance(layer, SparseLayer)
                else LayerActivity(dense_steps=self._dense_calls[i])
                for i, layer in enumerate(self.layers)
            }
        )

    def count_dense(self, layer: int) -> None:
        """Count an attention call of a layer that is not sparse."""
        self._dense_calls[layer] += 1

    # -- making others ---------------------------------------------------------------------------------------------

    def clone(self, budget: Budget | PerLayer | EllipsisType = ...) -> SparseCache:
        """Return an independent copy that counts anew, with another `budget` if given; one index serves many questions.

        Raises:
            ValueError: a budget that does not fit a layer.
        """
        twin: SparseCache = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        # Layers of transformers make new tensors when they grow, so a shallow copy of these is independent.
        twin.layers = [x.clone() if isinstance(x, SparseLayer) else copy.copy(x) for x in self.layers]
        twin._dense_calls, twin.board, twin._passes = Counter(), Board(), self._passes.clone()
        twin.dense_rows = DenseRows()
        twin._real = self._real.clone()
        for layer in twin.sparse_layers.values():
            for part in layer.parts:
                selector = part.rows.selector
                selector.bind(replace(selector.layer_context, board=twin.board))
        twin._prepared_before = True  # the model is given back by the first one
        if budget is not ...:
            if self.selector == NATIVE:
                checks.check_native({"budget": budget}, SparseCache.clone)
            twin.budget = budget
            checks.check_mapping("budget", budget, list(twin.sparse_layers))
            for index, layer in twin.sparse_layers.items():
                of_layer = checks.of_layer(budget, index)
                for part in layer.parts:
                    checks.check_budget(index, of_layer, part.share)
                    part.assign(part.share, of_layer)
        return twin

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def real(self) -> Tensor | None:
        """`[B,T]` bool on the CPU, which tokens are no padding; None: all. The mask of a later pass says the same of
        them."""
        return self._real.real

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what every layer holds to a prompt cache, see `KVCache.save`, with the model's fingerprint.

        Raises:
            ValueError: a layer whose index or state is not in rows and tensors.
            RuntimeError: nothing is held, or a pass was cut short.
        """
        if not self._passes.whole(self.layers):
            raise RuntimeError("a forward pass was cut short, and its layers hold different tokens: crop(0) first")
        self.here.require_whole("a prompt cache")
        prompt_files.save(self, path)

    def load(self, path: str | os.PathLike[str]) -> SparseCache:
        """Take up what `save` wrote, into this cache, which is empty, and return it. The model goes on behind the
        tokens that were taken in there: `generate` is given their ids and the new ones.

        Rows decide what a model says, as its weights do: load files that you trust.

        Raises:
            ValueError: a damaged file, or one of another model, dtype, RoPE, selector, or settings of rows (see
                `KVCache.load`). The cache stays empty.
        """
        if self._tokens():
            raise ValueError(
                f"a prompt cache is loaded into an empty SparseCache, and this one has {self._tokens()} tokens"
            )
        self.here.require_whole("a prompt cache")
        self._real.real = prompt_files.load(self, path)
        self._dtype = self.model.dtype
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCache:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a SparseCache is not pickled, as its model would go with it: clone() copies it here, and elsewhere a new "
            "one takes the tokens in again"
        )

    def _tokens(self) -> int:
        """Return the number of tokens taken in, padding included."""
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                return layer.columns
        return int(self.get_seq_length())

    # -- a forward pass ----------------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give a layer new keys and values `[B,H,n,D]` and return those that it attends to."""
        if layer_idx < len(self.layers) and not isinstance(layer := self.layers[layer_idx], SparseLayer):
            read = self.dense_rows.put(layer_idx, layer, key_states, value_states)
            if read is not None:
                return read
        out: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return out

    def begin(self, inputs: Mapping[str, Any], logits: int) -> Run:
        """Begin a forward pass with these keyword arguments, and return what the layers need to know of it.

        Args:
            inputs: of the model's inner part: ids or embeddings, mask, positions.
            logits: how many of the last tokens the model returns logits of; 0: all.

        Raises:
            RuntimeError: another thread runs a pass with this cache, or an earlier pass was cut short and has left its
                layers unequal.
            ValueError: the model has changed its dtype, the inputs are none that it takes, or they do not go on from
                what the cache holds.
        """
        self._passes.begin(self.layers)
        self._real.begin()
        self.dense_rows.mask = None
        try:
            return self._run(inputs, logits)
        except BaseException:
            self.cut_short()
            raise

    def _run(self, inputs: Mapping[str, Any], logits: int) -> Run:
        ids = inputs.get("input_ids")
        ids = inputs.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise ModelError(
                "call the model with input_ids= or inputs_embeds= by name, which tell how many tokens come"
            )
        if inputs.get("output_attentions", getattr(self.model.config, "output_attentions", False)):
            raise ModelError("sparse attention has no weights to put out: output_attentions is for the model restored")
        batch, new = ids.shape[:2]
        tokens = self._tokens()
        if not tokens:
            self._dtype, self._batch = self.model.dtype, batch
        elif self._dtype != self.model.dtype:
            raise ValueError(another_dtype(self._dtype, self.model.dtype))
        elif batch != self._batch:
            self._check_batch(batch)
        if new != 1:
            check_generated(inputs, tokens, new, logits)
        positions = self._real.take_in(inputs.get("attention_mask"), inputs.get("position_ids"), tokens, batch, new)
        self.board.clear()
        if (drafts := min(logits, new) - 1) > 0:  # which may be rejected
            for layer in self.sparse_layers.values():
                layer.keep_unsealed(drafts)
        return Run(self, self.prepared.original, sparse_tokens(self.sparse_from, tokens, new, logits), positions)

    def _check_batch(self, batch: int) -> None:
        """Check that as many sequences are held, which may have been edited since the last pass; else ModelError."""
        held = batch  # where no layer tells
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                held = layer.batch
                break
            if isinstance(keys := getattr(layer, "keys", None), Tensor):
                held = len(keys)
        if batch != held:
            raise ModelError(
                f"this cache holds {held} sequence{'s' if held != 1 else ''}, and the pass brings {batch}: reset() it "
                f"or make a new one"
            )
        self._batch = batch

    def end(self) -> None:
        """Note that the forward pass has come to its end.

        Raises:
            RuntimeError: a layer was given rows and has not attended to them.
        """
        self._passes.end(self.layers)

    def cut_short(self) -> None:
        """Note that the pass was ended by an error or by Ctrl-C. If it has left rows, no other pass begins."""
        self._passes.cut_short(self.layers)
        self._real.cut_short()

    # -- the model -------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Give the model its own attention back; see `restore`."""
        restore(self.model)

    def __enter__(self) -> SparseCache:
        return self

    def __exit__(self, *error: object) -> None:
        leave(self, self._prepared_before)

    def __repr__(self) -> str:
        shown = {name: value for name, value in {**self._settings, "seal": self._seal}.items() if value}
        shown |= {"dense_layers": list(self.dense_layers), "sparse_from": self.sparse_from}
        settings = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return (
            f"SparseCache({name_of(self.model)}, {self.roles or self.selector!r}, budget={self.budget!r}, {settings}): "
            f"{self._tokens()} tokens, {len(self.sparse_layers)} of {len(self.layers)} layers sparse"
        )
