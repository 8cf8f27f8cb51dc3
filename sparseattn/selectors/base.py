"""The contract of a method: it is shown rows as they are sealed and chooses, for a query, which of them to read."""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparseattn.core.context import Heads as Heads
from sparseattn.core.context import LayerContext as LayerContext
from sparseattn.core.context import StepContext as StepContext
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, scored_by_torch, sorted_best
from sparseattn.kernels.group_vote.dispatch import GROUPS as GROUPS
from sparseattn.kernels.group_vote.dispatch import vote as vote
from sparseattn.kernels.topk.dispatch import best as best
from sparseattn.selectors.abilities import EstimatesMass, HostOnly, LearnsFromQueries, ReadsKeys, ReadsRoundedKeys
from sparseattn.selectors.identity import Named, identity, own_code
from sparseattn.selectors.rows import Rows as Rows
from sparseattn.selectors.state import Stateful

Self = TypeVar("Self", bound="Selector")
Ability = TypeVar("Ability")

# What a class of the old form has: attribute -> what says it now.
OLD_FORM = {
    "queries_share": "LearnsFromQueries",
    "last_queries": "LearnsFromQueries",
    "biases": "Biases",
    "evicts": "Evicts",
    "observes": "Observes",
    "tails": "HasTail",
    "host": "HostOnly",
    "foresees": "LooksAhead",
    "needs_near": "WeighsUnsealed",
    "reads_stored": "ReadsKeys",
    "estimates": "EstimatesMass",
}


class Selector(Stateful, Named, ABC):
    """Chooses, for every KV head (or every query head), the stored rows to read. One instance serves one layer.

    A method is one subclass in one file, which says `append`, `select` and, to be compared by bytes, `scan`. The cache
    knows when nothing is sealed (then it asks nothing), which rows are valid (`StepContext.valid`), and how many were
    scanned. What else a method does is an ability that its class names in its bases: see `selectors.abilities`.

    The constructor's arguments are the configuration: each is stored under its own name, so that `repr` is the
    experiment's label. What depends on the rows seen lies in `State` attributes made in the constructor (tensors in a
    `RowBuffer`; a plain counter is set back in `reset`); other attributes are parameters, shared by clones.

    A method may be made of others: `part_names` names the attributes that hold them. They are cloned, reordered, moved
    and reset with the method, and told what it is told. It passes on `append`, `select` and `fix`, and rows in the
    order in which they are stored; to what else a part can do the cache turns itself (`find`), so a part that observes
    or has a tail learns of the whole method's selection.

    Attributes:
        layer_context: the layer that this instance serves, set by `bind`.
        span: longest span of a selection, a power of two; a budget is at least that.
        unit: the cache seals multiples of this many rows, itself a multiple of the span, which it is by default; with
            parts, the least common multiple of the span and their units.
        uses_budget: whether the choice depends on the budget at all.
        knob: the argument that trades recall for work, see `Named`.
        best_first: whether the slots of its selections are single rows, the best of each head first, so that the first
            of them are what a smaller budget would read.
        part_names: see above.
        late: names of parameters that `append` may fill in, because no row decides what they hold, such as a model that
            is loaded at its first use.
        operators: about how many tensor operations `select` takes beside the launches that `scan` names.
        fixed_for_cache, rows_of_cache: what a cache sets of a selector that it has fixed storage for, or stores rows
            for: one selector serves one cache.
    """

    layer_context: LayerContext = LayerContext()
    span: int = 1
    uses_budget: bool = True
    best_first: bool = False
    late: tuple[str, ...] = ()
    operators: int = 8
    fixed_for_cache: bool = False
    rows_of_cache: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refuse_old_form(cls)

    # -- what a method says --------------------------------------------------------------------------------------------

    @abstractmethod
    def append(self, rows: Rows) -> Tensor | None:
        """Take newly sealed rows into the index.

        Returns:
            The order to store them in, `[B,H,n]` int64, a permutation of `range(n)` per head (place i receives row
            `order[..., i]`), or None to keep them as they are. Selections name rows by their stored place.

            An order `[B,H,m]` of more rows permutes the last m sealed rows, the new ones behind those that are stored:
            so a selector joins runs of its rows that several seals have scattered. It moves m rows of keys and values,
            which is for rare occasions; the first seal has no others.
        """

    @abstractmethod
    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        """Choose at most `budget` sealed rows for each head. It is asked only once rows are sealed.

        Args:
            query: `[B,H,G,D]`, after RoPE.
            step: the query's positions, which rows are valid, and what the method's abilities are told.
            budget: rows per head, 1 or more; sink and window come on top.
        """

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Say what choosing reads: the one source of `Selection.scanned` and `scan_bytes`, of predicted times and of
        documents.

        `Scan(scanned, read)` is enough. A method with kernels of its own names their launches too (`ranked`), for
        predictions of time. If the data decide how much is read, return what is expected, and set `scanned` and
        `scan_bytes` in the selection.

        Args:
            query: `[B,H,G,D]`, of which the shape and the dtype are looked at; it may lie on the device "meta".
            sealed: rows of a sequence that it was shown, 1 or more, none of them padding.
            budget: as `select` is given.

        Returns:
            None: it does not say. Comparisons then show "?", and no time is predicted.
        """
        return None

    def allowed(self, budget: int) -> int:
        """Return the rows that this instance may read where a budget of `budget` rows is given; by default all.

        Asked before a budget is cut to the rows there are, so that it does not follow the length of the context, and
        not where the budget is None. `select` is given the answer, cut.
        """
        return budget

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        """Refuse a layer that it cannot serve, before a row is stored; `layer_context` says which. By default parts do.

        Args:
            heads: KV heads that it is to be shown.
            group: query heads of each; None where they are not known yet, as in a cache whose rows come without
                queries.
            size: head_dim.

        Raises:
            ValueError: a layer of such heads, or without what the method needs, such as the layer's RoPE.
        """
        for _, part in self.parts():
            part.check_shape(heads, group, size)

    def fix(self, rows: int, seal: int) -> None:
        """Give the state storage that is allocated once (`RowBuffer.fix`), before the first row is sealed.

        From then on `select` reads `RowBuffer.visible`, so that nothing of a step but the queries and what tensors hold
        changes from seal to seal, and a CUDA graph of it stays right.

        Args:
            rows: most that will be sealed, padding included.
            seal: fewest rows of a seal, the first one's aside.

        Raises:
            ValueError: a method that cannot: it works on the host, or nobody has said how much room its state needs.
        """
        raise ValueError(f"{self} has no step of fixed shapes and addresses: build the KVCache without fixed=True")

    def why_not_dealt(self) -> str | None:
        """Return why rows cannot be dealt to processes, each of which asks an instance of its own for the best of its
        rows (`KVCache(group=)`), as the end of a sentence; None, by default: they can. Abilities that need all rows in
        one process need not be named here."""
        return None

    def check_state(self, state: Mapping[str, Tensor], rows: Rows, order: Tensor | None) -> None:
        """Refuse what no `append(rows)` of an empty instance leaves in its row buffers: a file may hold anything.

        A method that overrides it has its index kept in files where a cache is asked to (`KVCache(indexes=)`); others
        are built every time. A file is found by all of `rows` but the values: a method whose index depends on these
        keeps none. `selectors.saved_state` has the usual checks.

        Args:
            state: attribute -> what its row buffer is to hold, in host memory; buffers that are empty are not in it.
            rows: what the index was built from.
            order: what `append` returned, a permutation, or None.

        Raises:
            ValueError: a name, shape, dtype or number that does not fit.
        """
        raise ValueError(f"{self} does not say what its state must be (check_state), so it is not read from files")

    def resume(self, keys: Tensor) -> None:
        """Make ready what is `late`, where its state comes from a file and `append` does not come; parts do by default.

        Args:
            keys: `[B,H,0,D]`, of the dtype and on the device of those that it was shown.
        """
        for _, part in self.parts():
            part.resume(keys)

    # -- the layer -----------------------------------------------------------------------------------------------------

    def for_layer(self: Self, layer: LayerContext | int) -> Self:
        """Return a fresh instance for a model's layer, by its context or its number alone: same configuration and repr,
        no rows."""
        context = LayerContext(layer) if isinstance(layer, int) else layer
        fresh = self._copied(lambda state: state.fresh(), lambda part: part.for_layer(context))
        fresh.reset()
        for part in fresh.tree():
            part.fixed_for_cache = False
        fresh.bind(context)
        return fresh

    def bind(self, context: LayerContext) -> None:
        """Tell it and its parts which layer it serves, before rows are sealed."""
        self.layer_context = context
        for _, part in self.parts():
            part.bind(context)

    def count_in(self, key_bytes: int | None) -> None:
        """Count an element of a key as so many bytes, see `LayerContext.key_bytes`."""
        self.bind(dataclasses.replace(self.layer_context, key_bytes=key_bytes))

    @property
    def layer(self) -> int:
        """The layer's number in the model."""
        return self.layer_context.layer

    def head_numbers(self, heads: int) -> Sequence[int]:
        """Return which of the layer's KV heads the `heads` are that this instance is shown."""
        return range(heads) if self.layer_context.heads is None else self.layer_context.heads.which

    def temperature(self, size: int) -> float:
        """Return what products of queries and keys of `size` channels are divided by for logits: `1/scale`, or
        `sqrt(size)` where the layer's scale is not known."""
        scale = self.layer_context.scale
        return size**0.5 if scale is None else 1 / scale

    def bytes_of(self, rows: Tensor) -> int:
        """Return the bytes of an element of `rows`, keys or what is kept in their dtype, in counts of bytes read."""
        width = self.layer_context.key_bytes
        return rows.element_size() if width is None else min(width, rows.element_size())

    # -- abilities and parts -------------------------------------------------------------------------------------------

    def parts(self) -> list[tuple[str, Selector]]:
        """Return the selectors that this one is made of, by the attribute's name."""
        return [(name, getattr(self, name)) for name in self.part_names]

    def has(self, ability: type) -> bool:
        """Return whether this instance, as it is configured, has an ability that its class names in its bases."""
        return isinstance(self, ability)

    def find(self, ability: type[Ability]) -> list[Ability]:
        """Return those of this instance and its parts, at any depth, that have an ability."""
        own: list[Any] = [self] if self.has(ability) else []
        return own + [inner for _, part in self.parts() for inner in part.find(ability)]

    def tree(self) -> list[Selector]:
        """Return it and what it is made of, down to the last part."""
        return [self, *(inner for _, part in self.parts() for inner in part.tree())]

    @property
    def unit(self) -> int:
        return math.lcm(self.span, *(part.unit for _, part in self.parts())) if self.part_names else self.span

    @property
    def host(self) -> bool:
        """Whether it, or a part of it, works in host memory alone."""
        return bool(self.find(HostOnly))

    @property
    def estimates(self) -> bool:
        """Whether it says what its rows weigh, so that a budget may be a mass."""
        return self.has(EstimatesMass)

    @property
    def queries_wanted(self) -> tuple[float, int]:
        """The share of the prompt's queries, and how many of its newest, that it and its parts learn from."""
        learners = self.find(LearnsFromQueries)
        share = max((part.queries_share for part in learners), default=0.0)
        return share, max((part.last_queries for part in learners), default=0)

    @property
    def all_learn_once(self) -> bool:
        """Whether queries of sampled rows count for nothing behind the first seal, for it and its parts."""
        return all(part.learns_once for part in self.find(LearnsFromQueries) if part.queries_share)

    @property
    def learns(self) -> bool:
        """Whether it learns from queries of the prompt, so that a cache is given them with the rows."""
        return any(self.queries_wanted)

    # -- what it read --------------------------------------------------------------------------------------------------

    def counted(self, selection: Selection, query: Tensor, step: StepContext, budget: int) -> Selection:
        """Return `selection` with what choosing it read, by `scan`, where the step asks for it and it does not say."""
        if not step.counted or selection.scan_bytes is not None or selection.scanned is not None:
            return selection
        nothing = Scan(0, 0)
        scans = {rows: self.scan(query, rows, budget) if rows else nothing for rows in {*step.sealed}}
        if None in scans.values():
            return selection
        if other := [scan for scan in scans.values() if not isinstance(scan, Scan)]:
            raise ValueError(f"{self!r} returned {type(other[0]).__name__} from scan, which returns a Scan or None")
        each = [scan for rows in step.sealed if (scan := scans[rows]) is not None]
        device, lists = selection.start.device, selection.start.shape[1]
        scanned = torch.tensor([[int(scan.scanned)] for scan in each], device=device).expand(-1, lists)
        read = torch.tensor([[int(scan.read)] for scan in each], device=device).expand(-1, query.shape[1])
        return dataclasses.replace(selection, scanned=scanned, scan_bytes=read)

    def full_scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Return `scan` with launches and rows: if the method names none, as if torch scored what it reads."""
        scan = self.scan(query, sealed, budget)
        if scan is None or scan.lists:
            return scan
        return scored_by_torch(scan, query, min(budget, sealed), self.span, self.operators)

    def ranked(
        self,
        query: Tensor,
        scan: Scan,
        scoring: Sequence[Launch],
        measured: tuple[int, int],
        *,
        group: str = "each",
        page: int = 1,
        expected: str = "",
    ) -> Scan:
        """Return `scan` of a method that scores candidates and reads the best, with its launches.

        Args:
            query: as of `scan`.
            scan: what it scans and reads.
            scoring: its launches but the sort's and small operators', of all sequences and heads.
            measured: candidates for each list, and how many of them are read.
            group: the group's vote.
            page: rows of a candidate.
            expected: see `Scan`.
        """
        batch, heads, members, _ = query.shape
        lists = heads * members if group == "each" else heads
        many, few = measured
        work = sorted_best(batch * heads * members if group == "softmax" else batch * lists, many, few)
        launches = (*scoring, Launch("sort", entries=work), Launch("operator", count=self.operators))
        rows = few * page
        return dataclasses.replace(scan, launches=launches, lists=lists, rows=rows, runs=few, expected=expected)

    def source(self) -> str:
        """Return the class's identity, of a class of a user a hash of its code, and where it reads a file that one's:
        with `repr`, what results depend on. Of a method with parts, theirs too."""
        code = own_code(type(self))
        inner = ", ".join(f"{name}={part.source()}" for name, part in self.parts())
        return identity(type(self)) + ("" if code is None else f" {code}") + (f"({inner})" if inner else "")

    # -- what the cache's own keys become ------------------------------------------------------------------------------

    def _copied(self: Self, *args: Any) -> Self:
        twin = super()._copied(*args)
        twin._forget_views()
        return twin

    def reset(self) -> None:
        super().reset()
        self._forget_views()

    def _forget_views(self) -> None:
        """Let go of what the cache showed, which is another's now."""
        self.rows_of_cache = False
        for ability in (ReadsKeys, ReadsRoundedKeys):
            if isinstance(self, ability):
                ability.forget_view(self)


def _refuse_old_form(cls: type[Selector]) -> None:
    """Refuse a class that is written for the contract as it was: TypeError with what to change."""
    for name, ability in OLD_FORM.items():
        own = vars(cls).get(name)
        if isinstance(own, (bool, int, float)) and not (name.endswith(("share", "queries")) and _learns(cls)):
            raise TypeError(
                f"{cls.__name__} sets {name} = {own!r}: a class now names {ability} in its bases "
                f"(sparseattn.selectors.abilities), and an instance that lacks it says so in `has`"
            )
    if "cost" in vars(cls):
        raise TypeError(
            f"{cls.__name__} has cost: the Scan that scan returns names launches, lists and rows now (ranked)"
        )
    parameters = [*inspect.signature(cls.select).parameters]
    if len(parameters) > 2 and parameters[2] == "positions":
        raise TypeError(
            f"{cls.__name__}.select takes (query, positions, budget): it is select(query, step, budget) now, with "
            f"step.positions, step.valid and what else a step tells (StepContext)"
        )


def _learns(cls: type[Selector]) -> bool:
    return issubclass(cls, LearnsFromQueries)
