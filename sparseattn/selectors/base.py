"""The contract of a method: it is shown rows as they are sealed and chooses, for a query, which of them to read."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sparseattn.core.row_buffer import State
from sparseattn.core.selection import Selection, Tail, Weighed
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.kernels.group_vote.dispatch import GROUPS as GROUPS
from sparseattn.kernels.group_vote.dispatch import vote as vote
from sparseattn.kernels.topk.dispatch import best as best
from sparseattn.selectors.names import NAMES

if TYPE_CHECKING:
    from sparseattn.core.layer_choices import Board
    from sparseattn.core.rope import Rope
    from sparseattn.kernels.attend_quantized.reference import CodedRows

Self = TypeVar("Self", bound="Selector")

# What parts are told as well.
TOLD = ("layer", "heads", "rope", "stored", "rounded", "width", "ahead", "near", "depth", "scale", "board")
MOST = 1 << 16  # entries of a list that is kept for every query, guide or key: 8 bytes each


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What a seal shows to a selector. A later need adds a field here, not an argument to `append`.

    The tensors are views of the cache's storage, valid during the call: what a selector keeps, it copies (`RowBuffer`
    does). Stored keys in their final order are at `Selector.stored`.

    Args:
        keys: `[B,H,n,D]`, after RoPE.
        values: `[B,H,n,D]`.
        positions: `[B,n]` int64 token positions; negative marks a row of padding, never to be selected. Padding comes
            in whole units of the selector: a page is all padding or none.
        queries: `[B,H,G,m,D]` of those of the rows that are sampled for the selector's `queries_share`, 0 or more of
            them; None where the share is 0. Zero for padding.
        query_positions: `[B,m]` int64, the token positions of `queries`; negative marks padding.
        last_queries: `[B,H,G,n,D]`, the prompt's n newest queries, the newest last, at the first seal of a selector
            whose `last_queries` is n (more where its `queries_share` is 1); else None. The prompt is what is stored
            then, sink and window included, without the row of the step that is being decoded. Zero where a prompt is
            shorter than n, in front.
        last_positions: `[B,n]` int64, the token positions of `last_queries`; negative marks padding.
        unsealed: `[B,H,u,D]`, with `last_queries`: the keys of those of the prompt's rows that are not sealed (sink,
            window and what waits), so that a causal softmax of `last_queries` over all of the prompt is exact.
            Zero for padding.
        unsealed_positions: `[B,u]` int64, the token positions of `unsealed`; negative marks padding.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    last_queries: Tensor | None = None
    last_positions: Tensor | None = None
    unsealed: Tensor | None = None
    unsealed_positions: Tensor | None = None


class Heads(NamedTuple):
    """Some of a layer's KV heads.

    Args:
        which: their numbers in the layer, ascending.
        of: how many the layer has.
    """

    which: tuple[int, ...]
    of: int


class Selector(ABC):
    """Chooses, for every KV head (or every query head), the stored rows to read. One instance serves one layer.

    A method is one subclass in one file. Its constructor's arguments are its configuration: each is stored under its
    own name, so that `repr` is the experiment's label. What depends on the rows seen lives in `State` attributes
    (tensors in a `RowBuffer`) made in the constructor (a plain counter is set back in `reset`); other attributes are
    parameters, shared by clones.

    A method may be made of others: an attribute that is a `Selector` is a part of it. Its state is the method's, under
    names such as `pages.low`; it is cloned, reordered, moved and reset with the method, and told what the method is
    told (`TOLD`). The method passes on `append`, `select` and `fix`, and rows in the order in which they are stored.
    Where a part observes or has a tail, so does the method, which passes on `observe` and `tail`: a part then learns of
    the method's selection, not of its own.

    Attributes:
        span: longest span of a selection, a power of two; a budget is at least that.
        unit: the cache seals multiples of this many rows, itself a multiple of the span, which it is by default; with
            parts, the least common multiple of the span and their units.
        queries_share: share of the rows whose queries `append` wants, 0 none to 1 all. The cache keeps the queries of
            rows until they are sealed, and each is G times a key; rows are sampled evenly, by position. At least that
            of every part; one that wants a smaller share sees the same queries.
        last_queries: how many of the prompt's newest queries the first `append` wants (`Rows.last_queries`), 0 none. At
            least that of every part; one that wants fewer sees the same, of which its own are the last. With a
            `queries_share` of 1 at least those of all rows behind the sealed ones: then no query is missing but those
            of the sink's rows.
        biases: whether its selections have a bias (`Selection.bias`), or a part's have.
        evicts: whether it drops rows, or a part does, and never names them again: see `held`.
        observes: whether it learns from the weights that its selections got (`observe`), or a part does.
        tails: whether it has rows of its own to attend to (`tail`), or a part has.
        host: whether it works in host memory only, or a part does; a cache on a GPU then needs `sealed_device="cpu"`.
        uses_budget: whether the choice depends on the budget at all.
        estimates: whether it says what its rows weigh (`weigh`), so that a budget may be a mass.
        operators: about how many tensor operations `select` takes beside the launches that `cost` names.
        knob: the constructor's argument that trades recall for work in `select`; set on a built selector, it holds from
            the next query on. None: there is no such argument.
        usual: parts that are as by default, as `label` says them.
        late: names of parameters that `append` may fill in, because no row decides what they hold, such as a model that
            is loaded at its first use.
        width: bytes of an element of a key in `scan_bytes`; None: those it is kept in. Set where a comparison computes
            in float32 what a model keeps in 16 bits: 8-bit bounds and float32 statistics would look half as dear.
        layer: the model layer this instance serves, set by `for_layer`.
        heads: which of the layer's KV heads this instance is shown, where others have another method (`roles`); H is
            their number then. For methods with parameters of their own for a head. None: all of them.
        depth: layers of the model where the caller knows it, for methods that differ by layer.
        rope: that layer's rotary embedding where the caller knows it, for methods that need keys before RoPE.
        scale: factor of that layer's logits where the caller knows it, for methods that compute probabilities; None:
            `1/sqrt(D)`. See `temperature`.
        stored: `[B,H,N,D]` the sealed keys in stored order, a view that the cache keeps current; for methods that
            score keys themselves; with `KVCache(fixed=True)` all places behind the sink, the selector telling which
            are taken. None outside a cache, and in one of rows of few bits; see `reads_stored`.
        reads_stored: whether it reads `stored`, or a part does: a cache of rows of few bits (`KVCache(bits=)`), which
            keeps no keys, refuses it.
        rounded: the sealed rows as a cache of rows of few bits keeps them, in stored order, kept current for methods
            that ask for it by `rounded_group`; None elsewhere.
        rounded_group: rows of a group of rounded keys whose levels it reads off `rounded`, or a part does: other caches
            refuse it. None: it reads none.
        foresees: whether `select` goes by `ahead`, or a part's does.
        ahead: `[B,H,G,D]`, after RoPE: what this layer's projection makes of the input of the attention layer before,
            for the step about to be taken. `KVCache.foresee` tells it, and it holds for one `select`; `clone`,
            `reorder` and `crop` drop it. None: nobody has.
        board: where a layer that chooses for others leaves its choice, one for all layers of a model that run one after
            another. None: it is shown no other layer.
        needs_near: whether `select` goes by `near`, or a part's does.
        near: `[B,H,G]` float32, the natural logarithm of the sum of exponentiated logits of the rows that every query
            reads, sink and unsealed; told for one `select`. -inf for none, None outside a cache. Where sealed rows lie
            apart the host waits for it.
        fit: scale and offset `[H,G]` that make estimates of logits hold what they promise, of all of a layer's heads
            (`Fitted`); None: as they are. See `fitted`.
    """

    span: int = 1
    queries_share: float = 0.0
    last_queries: int = 0
    biases: bool = False
    evicts: bool = False
    observes: bool = False
    tails: bool = False
    host: bool = False
    foresees: bool = False
    needs_near: bool = False
    reads_stored: bool = False
    rounded_group: int | None = None
    uses_budget: bool = True
    estimates: bool = False
    operators: int = 8
    width: int | None = None
    knob: str | None = None
    usual: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    layer: int = 0
    depth: int | None = None
    heads: Heads | None = None
    rope: Rope | None = None
    scale: float | None = None
    stored: Tensor | None = None
    rounded: CodedRows | None = None
    ahead: Tensor | None = None
    board: Board | None = None
    near: Tensor | None = None
    fit: tuple[Tensor, Tensor] | None = None

    @property
    def unit(self) -> int:
        return math.lcm(self.span, *(part.unit for _, part in self.parts()))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, Selector):
            self.queries_share = max(self.queries_share, value.queries_share)
            self.last_queries = max(self.last_queries, value.last_queries)
            self.biases = self.biases or value.biases
            self.evicts = self.evicts or value.evicts
            self.observes, self.tails = self.observes or value.observes, self.tails or value.tails
            self.host = self.host or value.host
            self.foresees = self.foresees or value.foresees
            self.needs_near = self.needs_near or value.needs_near
            self.reads_stored = self.reads_stored or value.reads_stored
            self.rounded_group = self.rounded_group or value.rounded_group
        elif name in TOLD:
            for _, part in self.parts():
                setattr(part, name, value)

    def numbers(self, heads: int) -> Sequence[int]:
        """Which of the layer's KV heads the `heads` are that this instance is shown."""
        return range(heads) if self.heads is None else self.heads.which

    def temperature(self, size: int) -> float:
        """What products of queries and keys of `size` channels are divided by for logits: `1/scale`, or `sqrt(size)`
        where the scale is not known."""
        return size**0.5 if self.scale is None else 1 / self.scale

    @property
    def follows(self) -> int | None:
        """The layer of the model whose choice it, or a part of it, reads at each step; None: it chooses itself."""
        return next((layer for _, part in self.parts() if (layer := part.follows) is not None), None)

    @property
    def learns(self) -> bool:
        """Whether it wants queries of the prompt, so that a cache is given them with the rows."""
        return self.queries_share > 0 or self.last_queries > 0

    def parts(self) -> list[tuple[str, Selector]]:
        """The selectors that this one is made of, by the attribute's name."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Selector)]

    def within(self) -> list[Selector]:
        """It and what it is made of, down to the last part."""
        return [self, *(inner for _, part in self.parts() for inner in part.within())]

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        """Refuse a layer that it cannot serve, before a row is stored; `for_layer` has said which. By default parts do.

        Args:
            heads: KV heads that it is to be shown.
            group: query heads of each; None where they are not known yet, as in a cache whose rows come without
                queries.
            size: of a head.

        Raises:
            ValueError: a layer of such heads, or without what the method needs, such as the layer's RoPE.
        """
        for _, part in self.parts():
            part.check_shape(heads, group, size)

    def allowed(self, budget: int) -> int:
        """Rows that this instance may read where a budget of `budget` rows is given, at most as many; by default all.

        Asked before a budget is cut to the rows there are, so that it does not follow the length of the context, and
        not where the budget is None. `select` is given the answer, cut.
        """
        return budget

    @abstractmethod
    def append(self, rows: Rows) -> Tensor | None:
        """Takes newly sealed rows into the index.

        Returns:
            The order to store them in, `[B,H,n]` int64, a permutation of `range(n)` per head (place i receives row
            `order[..., i]`), or None to keep them as they are. Selections name rows by their stored place.

            An order `[B,H,m]` of more rows permutes the last m sealed rows, the new ones behind those that are stored:
            so a selector joins runs of its rows that several seals have scattered. It moves m rows of keys and values,
            which is for rare occasions; the first seal has no others.
        """

    @abstractmethod
    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        """Chooses at most `budget` sealed rows for each head.

        Args:
            query: `[B,H,G,D]`, after RoPE.
            positions: `[B]` int64, the query's token positions.
            budget: rows per head, 1 or more; sink and window come on top.
        """

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """What `select` costs, by formula: it looks at shapes alone, and needs no rows.

        Of a method whose work the data decide it is what is expected, and `Scan.expected` says of what.

        Args:
            query: `[B,H,G,D]` of the dtype of keys; it may lie on the device "meta".
            sealed: rows of each sequence that it would have been shown, 1 or more, none of them padding.
            budget: as `select` is given, at most `sealed` rows.

        Raises:
            ValueError: a method that does not say what choosing costs.
        """
        raise ValueError(f"{self!r} does not say what choosing costs (cost), so no time can be predicted")

    def ranked_cost(
        self,
        query: Tensor,
        scoring: Sequence[Launch],
        read: float,
        found: tuple[int, int],
        *,
        group: str = "each",
        page: int = 1,
        expected: str = "",
    ) -> Scan:
        """A `Scan` of a method that scores candidates and reads the best.

        Args:
            query: as of `cost`.
            scoring: its launches but the sort's and small operators', of all sequences and heads.
            read: bytes of a KV head of a sequence.
            found: candidates for each list, and how many of them are read.
            group: the group's vote.
            page: rows of a candidate.
            expected: see `Scan`.
        """
        batch, heads, members, _ = query.shape
        lists = heads * members if group == "each" else heads
        many, few = found
        work = sorted_best(batch * heads * members if group == "softmax" else batch * lists, many, few)
        launches = (*scoring, Launch("sort", entries=work), Launch("operator", count=self.operators))
        return Scan(read, launches, lists, few * page, few, expected=expected)

    def weigh(self, query: Tensor, positions: Tensor, budget: int) -> Weighed:
        """`select`, and what the rows chosen weigh by the method's own estimate; asked in its place if `estimates`.

        For budgets by mass: of the rows named, the heaviest are read until a share of the softmax is held. So logits
        are to be those of the step (`temperature`), and the estimate is to be of a sum, not the bound of a logit.

        Args:
            query, positions, budget: as `select` is given; of rows with the same score others may be chosen.

        Raises:
            ValueError: a method that does not estimate.
        """
        raise ValueError(
            f"{self!r} does not estimate what its rows weigh (weigh), so it cannot read until they hold a mass"
        )

    def fitted(self, logits: Tensor) -> Tensor:
        """Estimates of logits `[B,H,G,P]` for `weigh`, scaled and shifted where a `fit` says how."""
        if self.fit is None:
            return logits
        scale, offset = (part.to(logits.device) for part in self.fit)
        if self.heads is not None:
            scale, offset = (part[list(self.heads.which)] for part in (scale, offset))
        return logits * scale[None, :, :, None] + offset[None, :, :, None]

    def held(self) -> Tensor | None:
        """Which of the rows it was shown it still holds, for methods that evict: the others it names never again.

        Rows that are padding may be either. By default what all parts hold.

        Returns:
            `[B,H,N]` bool over the sealed rows in stored order, where they lie; None: all of them.
        """
        held = [mine for _, part in self.parts() if (mine := part.held()) is not None]
        return torch.stack(held).all(0) if held else None

    def keep(self, ids: Tensor) -> None:
        """Told by `KVCache.compact` that rows have moved: place i of a head now holds what place `ids[..., i]` held.

        Buffers `[B,H,N,...]` follow with `RowBuffer.keep`. `held` is over the K places from then on. `stored` still
        shows the places as they were.

        Args:
            ids: `[B,H,K]` int64, distinct in each head: the places it holds there, in rising order, then some that it
                does not hold, which fill up to K and stay dropped.

        Raises:
            ValueError: a method that cannot.
        """
        raise ValueError(f"{self!r} does not say how its state follows rows that move (keep), so none can be freed")

    def observe(self, selection: Selection, weights: Tensor) -> None:
        """What a decode step's selection got; called after every step if `observes`, of a step that names nothing too.

        What it learns lies in `State`. A step that `crop` takes back was observed all the same.

        Args:
            selection: as `select` returned it.
            weights: `[B,H*G,S,span]` float32, the softmax weights of its rows over everything attended: sink, window
                and tail are in the denominator. 0 in places that are not used. On the device of the sealed rows.
        """
        raise NotImplementedError(f"{self!r} observes, or a part of it does: it must say how, in `observe`")

    def tail(self, query: Tensor, positions: Tensor, selection: Selection) -> Tail | None:
        """Rows of its own that stand for what a step does not read; asked after `select` if `tails`.

        Args:
            query, positions: as `select` was given.
            selection: what is read, as `select` returned it.

        Returns:
            None: nothing is to be added, such as before the first seal.
        """
        raise NotImplementedError(f"{self!r} has a tail, or a part of it has: it must say which, in `tail`")

    def fix(self, rows: int, seal: int) -> None:
        """Gives the state storage that is allocated once (`RowBuffer.fix`), before the first row is sealed.

        From then on `select` reads `RowBuffer.visible`, so that nothing of a step but the queries and what tensors hold
        changes from seal to seal, and a CUDA graph of it stays right. `stored` is all of the cache's storage then.

        Args:
            rows: most that will be sealed, padding included.
            seal: fewest rows of a seal, the first one's aside.

        Raises:
            ValueError: a method that cannot: it works on the host, or nobody has said how much room its state needs.
        """
        raise ValueError(f"{self!r} has no step of fixed shapes and addresses: build the KVCache without fixed=True")

    def check_state(self, state: Mapping[str, Tensor], rows: Rows, order: Tensor | None) -> None:
        """Refuses what no `append(rows)` of an empty instance leaves in its row buffers: a file may hold anything.

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
        raise ValueError(f"{self!r} does not say what its state must be (check_state), so it is not read from files")

    def stored_keys(self) -> Tensor:
        """`stored`; RuntimeError outside a cache."""
        if self.stored is None:
            raise RuntimeError(
                f"{self!r} scores the cache's own keys: use it in a KVCache without bits, or set `stored` to [B,H,N,D]"
            )
        return self.stored

    def bytes_of(self, rows: Tensor) -> int:
        """Bytes of an element of `rows`, keys or what is kept in their dtype, in counts of bytes read (see `width`)."""
        return rows.element_size() if self.width is None else min(self.width, rows.element_size())

    def for_layer(self: Self, layer: int, rope: Rope | None = None) -> Self:
        """A fresh instance for a model layer: same configuration and repr, no rows."""
        fresh = self._twin(lambda state: state.fresh(), lambda part: part.for_layer(layer, rope))
        fresh.reset()
        fresh.layer, fresh.rope = layer, rope
        return fresh

    def clone(self: Self) -> Self:
        """An independent copy of the state; parameters are shared."""
        return self._twin(lambda state: state.clone(), lambda part: part.clone())

    def _twin(self: Self, made: Callable[[State], State], made_part: Callable[[Selector], Selector]) -> Self:
        twin = copy.copy(self)
        for name, state in self._states():
            setattr(twin, name, made(state))
        for name, part in self.parts():
            setattr(twin, name, made_part(part))
        twin.stored = twin.rounded = twin.ahead = twin.near = None  # behind the parts, which are told
        return twin

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was (beam search)."""
        self.ahead = self.near = None  # of sequences as they were
        for _, state in self._states():
            state.take(index)
        for _, part in self.parts():
            part.reorder(index)

    def reset(self) -> None:
        """Forgets every row."""
        self.stored = self.rounded = self.ahead = self.near = None
        for _, state in self._states():
            state.reset()
        for _, part in self.parts():
            part.reset()

    def to(self, device: torch.device | str) -> None:
        """Moves state and tensor parameters."""
        for name, value in vars(self).items():
            if isinstance(value, (State, Selector)):
                value.to(device)
            elif isinstance(value, (Tensor, torch.nn.Module)) and name != "stored":
                setattr(self, name, value.to(device))

    def _states(self) -> list[tuple[str, State]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, State)]

    def buffers(self) -> list[tuple[str, State]]:
        """The state: attributes that are row buffers or another `State`, by name, and those of parts as `part.name`."""
        inner = [(f"{name}.{held}", state) for name, part in self.parts() for held, state in part.buffers()]
        return self._states() + inner

    def index_arguments(self) -> dict[str, Any]:
        """What the index of given rows depends on, for JSON: the constructor's arguments, all but the knob; of a part,
        its class and what its index depends on."""
        names = [name for name in inspect.signature(type(self)).parameters if name != self.knob]
        given = {name: getattr(self, name) for name in names}
        return {
            name: {"selector": identity(type(value)), **value.index_arguments()}
            if isinstance(value, Selector)
            else value
            for name, value in given.items()
        }

    def source(self) -> str:
        """The class's identity and, where it reads a file, its hash: with `repr`, what results depend on. Of a method
        with parts, theirs too."""
        inner = ", ".join(f"{name}={part.source()}" for name, part in self.parts())
        return identity(type(self)) + (f"({inner})" if inner else "")

    def label(self, *, knob: bool = True) -> str:
        """The class and the arguments that are not as by default, the `knob` among them or not; a part by its label."""
        said = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if isinstance(value, Selector):
                if (part := f"{name}={value.label()}") not in self.usual:
                    said.append(part)
            elif value != parameter.default and (knob or name != self.knob):
                said.append(f"{name}={value!r}")
        return type(self).__name__ + (f"({', '.join(said)})" if said else "")

    def __repr__(self) -> str:
        names = inspect.signature(type(self)).parameters
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def identity(method: type[Selector]) -> str:
    """Return what index files and records call a class, wherever its module lies.

    A registered class goes by its name in the registry (`quest`), another one of this package by `sparseattn:Class`,
    and a class of a user by `module:Class`.
    """
    place = f"{method.__module__}:{method.__qualname__}"
    if place in NAMES:
        return NAMES[place]
    return f"sparseattn:{method.__qualname__}" if method.__module__.startswith("sparseattn.") else place


def half(keys: Tensor) -> torch.dtype:
    """What levels and centroids of keys are kept in: the keys' dtype if it is of 16 bits, else bfloat16."""
    return keys.dtype if keys.element_size() == 2 else torch.bfloat16


def check_least(**sizes: tuple[int, int]) -> None:
    """ValueError for an argument, given with its least value, that is below it."""
    for name, (size, least) in sizes.items():
        if size < least:
            raise ValueError(f"{name} is {least} or more, got {size}")


def check_most(**sizes: int) -> None:
    """ValueError for an argument above what a list, or a beam, of one query or key has any use for."""
    for name, size in sizes.items():
        if size > MOST:
            raise ValueError(f"{name} is {MOST:,} or less (a list of so many is half a MiB), got {size:,}")


def check_share(share: float) -> None:
    """ValueError where `share` is none."""
    if not 0 <= share <= 1:
        raise ValueError(f"share is the share of the queries used, 0 to 1, got {share}")


def warn_of_keys_as_queries(selector: Selector, heads: int, total: int) -> None:
    """Says that in `heads` of `total` heads no query was there to learn from."""
    warnings.warn(
        f"{selector!r} has no queries of the prefill to learn from in {heads} of {total} heads: the keys serve as "
        f"queries, so it finds less at the same work",
        stacklevel=3,
    )


def check_group(group: str) -> str:
    """`group` if it names a way for a query group to choose, else ValueError."""
    if group not in GROUPS:
        raise ValueError(f"group is one of {', '.join(GROUPS)}, got {group!r}")
    return group
