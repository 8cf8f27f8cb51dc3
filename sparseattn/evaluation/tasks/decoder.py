"""A transformers model as what `run` measures with: one dense prefill, from which every method decodes on its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparseattn.codecs.base import RowCodec
from sparseattn.core.activity import of_heads
from sparseattn.core.budget import Budget
from sparseattn.models.attention_routing import name_of
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.errors import ModelError
from sparseattn.models.input_device import input_device
from sparseattn.models.stats import Stats
from sparseattn.roles.fingerprint import fingerprint
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import Method, Roles
from sparseattn.selectors.baselines.native import NATIVE, Native

MOST_ROWS = 1 << 30  # a window that holds every context


def check_positions(positions: int | None, tokens: int, what: str, remedy: str = "") -> None:
    """ModelError where a model has no positions for so many tokens, with the `remedy` behind it; None: it has any."""
    if positions is not None and tokens > positions:
        raise ModelError(f"the model has {positions} positions, {what} takes {tokens}{remedy}")


class ModelDecoder:
    """Decodes with a causal LM of transformers, one sequence at a time.

    Args:
        model: as `load_model` gives it.
        sink, window: rows that every query of a sparse layer reads.
        dense_layers: how many of the first layers stay dense.
        seal: as in `KVCache`; None: the selector's span, so that less than a span of further dense rows flatters it.
        chunk: tokens per forward call of a prefill.
        queries: whether any selector to come learns from the prefill's queries.

    Attributes:
        positions: tokens that the model can tell apart by place; None: any number.
        ends: tokens that end a response.
    """

    def __init__(
        self,
        model: Any,
        *,
        sink: int = 4,
        window: int = 64,
        dense_layers: int = 0,
        seal: int | None = None,
        chunk: int = 2048,
        queries: bool = True,
    ) -> None:
        self.model, self.chunk, self.queries, self.seal = model, chunk, queries, seal
        self.settings: dict[str, Any] = {"sink": sink, "window": window, "dense_layers": dense_layers}
        self.config = model.config.get_text_config(decoder=True)
        if not 0 <= dense_layers < self.config.num_hidden_layers:
            raise ModelError(
                f"the model has {self.config.num_hidden_layers} layers: of them 0 to "
                f"{self.config.num_hidden_layers - 1} may be dense, got {dense_layers}"
            )
        self.positions: int | None = getattr(self.config, "max_position_embeddings", None)
        ends = model.generation_config.eos_token_id
        self.ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ModelError where the model has no positions for so many tokens, with the `remedy` behind it."""
        check_positions(self.positions, tokens, what, remedy)

    @functools.cached_property
    def sparse(self) -> tuple[int, ...]:
        """The layers that attend to the whole context and are not dense: those that can be sparse."""
        from sparseattn.models.sparse_cache import SparseCache

        return tuple(SparseCache(self.model, "window", None, **self.settings).sparse_layers)

    @functools.cached_property
    def _indexed(self) -> bool:
        """Whether the model has layers with an index of their own, which only a selector keeps from its choice."""
        from sparseattn.models.sparse_cache import SparseCache

        layers = SparseCache(self.model, "window", None, **self.settings).prepared.layers
        return any(layer.index is not None for layer in layers.values())

    def check_layers(self, layers: Sequence[int], what: str) -> None:
        """ModelError where not all of `layers` can be sparse."""
        strange = [layer for layer in layers if layer not in self.sparse]
        if strange:
            raise ModelError(
                f"{what} names layers of {', '.join(map(str, self.sparse))}, which attend to the whole context and are "
                f"not dense; layer {strange[0]} is none of them"
            )

    def check_roles(self, roles: Roles) -> None:
        """ValueError where roles do not fit the model, or a plan was made for another or with other rows."""
        from sparseattn.models.sparse_cache import SparseCache

        if isinstance(roles, Plan):
            roles.check_model(self.fingerprint(), name_of(self.model))
            roles.check_rows(self.settings["sink"], self.settings["window"])
        SparseCache(self.model, roles=roles, budget=None, seal=self.seal, **self.settings)

    def fingerprint(self) -> str:
        """To tell retrained weights of the same name apart."""
        return fingerprint(self.model.named_parameters())

    def read(self, tokens: Sequence[int]) -> Any:
        """Return a dense prefill."""
        from sparseattn.models.prefill import Prefill

        return Prefill(self.model, self._ids(tokens), chunk=self.chunk, queries=self.queries)

    def index(
        self,
        prefill: Any,
        tail: Sequence[int],
        selector: Method | None,
        layers: Sequence[int] | None = None,
        codec: RowCodec | None = None,
    ) -> Any:
        """Return the cache of one method behind a prefill and a `tail`, read densely too; its index is built.

        `layers`: those that are sparse, of `sparse`; None: all of these. `codec`: keeps the sealed rows; None: they
        stay as they come.
        """
        every = self.config.num_hidden_layers
        settings = dict(self.settings)
        if layers is not None:
            settings["dense_layers"] = sorted(set(range(every)) - set(layers))
        if isinstance(selector, Native):
            cache = prefill.cache(native=True, dense_layers=settings["dense_layers"])
        elif selector is None and self._indexed:  # all rows, without the index
            cache = prefill.cache("window", None, sink=0, window=MOST_ROWS)
        elif selector is None:
            cache = prefill.cache("window", None, dense_layers=every)
        else:
            which = {"roles": selector} if isinstance(selector, Roles) else {"selector": selector}
            cache = prefill.cache(**which, budget=None, seal=self.seal, rows=codec, check=True, **settings)
        cache.sparse_from = prefill.tokens + len(tail)
        if tail:
            self.forward(cache, tail, 1)
        cache.seal()
        return cache

    def start(self, indexed: Any, budget: Budget) -> ModelSession:
        """Return decoding from a copy of `indexed`, which stays as it is; a model's own index goes by no budget."""
        own = budget is None and indexed.selector == NATIVE
        return ModelSession(self, indexed.clone() if own else indexed.clone(budget))

    def forward(self, cache: Any, tokens: Sequence[int], logits: int) -> Tensor:
        """Return the logits `[n,V]` behind the last `logits` tokens, behind all of them for 0."""
        with torch.no_grad():
            out = self.model(
                input_ids=self._ids(tokens), use_cache=True, logits_to_keep=logits, **cache_argument(cache)
            )
        made: Tensor = out.logits[0]
        return made

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=input_device(self.model))


class ModelSession:
    """One method decoding, token by token."""

    def __init__(self, decoder: ModelDecoder, cache: Any) -> None:
        self._decoder, self._cache = decoder, cache
        self._fed, self._held = 0, 0  # tokens fed; rows stored when each was, summed

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Feed tokens through the method's attention, each by itself; the logits `[n,V]` behind each of them."""
        logits = self._decoder.forward(self._cache, tokens, 0)
        n = len(tokens)
        self._fed += n
        self._held += n * self._cache.get_seq_length() - n * (n - 1) // 2
        return logits

    def facts(self) -> dict[str, Any]:
        """`rows` attended by a query head of a sparse layer, of `context` rows stored, and the share of these rows'
        bytes that were read, to choose too (None where the selector does not say); means over the tokens. Layers that
        roles leave dense count, with all their rows. An answer of one token comes from the prefill, which read all
        rows. `activity` has the counts by layer."""
        here = self._cache.here  # of processes that share the model's heads
        stats = Stats.of_heads(here.of_all(self._cache.stats()))
        context = self._held / self._fed if self._fed else float(self._cache.get_seq_length())
        share, rows = (stats.bytes_share, stats.rows) if stats.sparse_calls else (1.0, context)
        if (roles := self._cache.roles) is not None:
            asked = set(self._decoder.sparse) - set(self._cache.dense_given)
            sparse, dense = len(self._cache.sparse_layers), sum(map(roles.dense, asked))
            share, rows = (
                (x * sparse + all_ * dense) / (sparse + dense) for x, all_ in ((share, 1.0), (rows, context))
            )
        return {
            "rows": rows,
            "context": context,
            "bytes_share": None if math.isnan(share) else share,
            "activity": of_heads(here.of_all(self._cache.activity())).to_dict(),
            "sparse_calls": stats.sparse_calls,
            "dense_calls": stats.dense_calls,
        }
