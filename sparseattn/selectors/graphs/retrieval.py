"""RetrievalAttention: keys in a graph that the prefill's queries guide. https://arxiv.org/abs/2409.10516"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.kernels.nearest import load_faiss, root_of_moment
from sparseattn.selectors.abilities import HostOnly, LearnsFromQueries, ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_least, check_most, check_share, warn_of_keys_as_queries
from sparseattn.selectors.graphs.search_cost import walk_scan
from sparseattn.selectors.saved_state import (
    Loaded,
    check_finite,
    check_lists,
    check_no_order,
    check_scored,
    check_tensors,
)

METRICS = ("l2", "query")


class RetrievalAttention(HostOnly, LearnsFromQueries, ReadsKeys, Selector):
    """Searches, for every query head, a graph over its KV head's keys and reads the best rows found.

    The graph is RoarGraph's (https://arxiv.org/abs/2408.08933), built from the exact nearest keys of the prefill's
    queries, one per query head over one copy of the keys. Rows sealed while decoding are inserted. It runs on the CPU,
    in compiled code, parallel over heads and batch: `KVCache(..., sealed_device="cpu")` serves it from a GPU.

    Args:
        beam: keys kept during a search, at least the budget in effect: more find more and scan more.
        neighbours: exact nearest keys of each training query (RoarGraph's N_q).
        degree: most neighbours of a key; three quarters come from the queries, the rest from enhancement.
        pivots: of each query's list, the first so many keys are linked to the others; RoarGraph's is 1.
        build_beam: beam of the searches that make every key reachable (RoarGraph's L).
        share: share of the prefill's queries that guide the graph, evenly spaced; of decode queries too. 0: the keys
            serve as queries, and a warning says so.
        metric: how far two keys are apart where lists are pruned and enhanced: "l2", or "query", the root mean square
            difference of their products with the training queries. The latter is ours, not the paper's.
        guides: training queries kept to place later keys, decode queries if there are fewer; 0 keeps none.

    The paper names RoarGraph and gives no parameters: these are ours, measured in the log, 2026-11-20. Left open there
    and settled here: similarity is the inner product of keys after RoPE; queries may guide keys that come after them;
    `scanned` counts distinct keys scored, the entry included; generated rows are inserted when they leave the window.
    Unlike RoarGraph's code, distances between keys are Euclidean, a query's first keys are all pivots, lists of queries
    with one pivot are united, pruned lists are not filled up with occluded keys, enhancement keeps within `degree`, and
    the entry, nearest to the keys' mean, has links.

    Inserting costs time once a seal, more than a search: leave `seal` at 1,024 for speed. With `metric="query"` or keys
    of 16 bits it takes time in proportion to the stored keys.

    Raises:
        ValueError: an argument out of its range.
        ImportError: numba or faiss is missing.
    """

    operators = 25
    knob = "beam"

    def __init__(
        self,
        beam: int = 300,
        neighbours: int = 100,
        degree: int = 32,
        pivots: int = 4,
        build_beam: int = 64,
        share: float = 1.0,
        metric: str = "l2",
        guides: int = 2048,
    ) -> None:
        check_least(beam=(beam, 1), neighbours=(neighbours, 1), degree=(degree, 2), pivots=(pivots, 1))
        check_least(build_beam=(build_beam, 1), guides=(guides, 0))
        check_most(neighbours=neighbours, degree=degree, pivots=pivots, build_beam=build_beam)
        check_share(share)
        if metric not in METRICS:
            raise ValueError(f"metric is one of {', '.join(METRICS)}, got {metric!r}")
        compiled()
        self.beam, self.neighbours, self.degree, self.pivots = beam, neighbours, degree, pivots
        self.build_beam, self.metric, self.guides = build_beam, metric, guides
        self.share = self.queries_share = share
        self.adjacency = RowBuffer(2)  # [B,Hs,N,W] int32
        self.parent = RowBuffer(2)  # [B,Hs,N] int32
        self.bias = RowBuffer(2)  # [B,Hs,N] float32
        self.entry = RowBuffer(2)  # [B,Hs,1] int32, -1 without keys
        self.guide = RowBuffer(2)  # [B,Hs,S,D] float32
        self.lists = RowBuffer(2)  # [B,Hs,S,K] int32
        self.scores = RowBuffer(2)  # [B,Hs,S,K] float32
        self.root = RowBuffer(2)  # [B,Hs,D,D] float32, of the queries' second moment, for metric "query"

    @classmethod
    def paper(cls, **knobs: Any) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: 128 + 512 rows dense, the others in host memory.

        Its budget is 100 rows, and 2,000 for key-value retrieval: `decode(query, cache, budget=100)`.
        """
        return {"selector": cls(**knobs), "sink": 128, "window": 512, "sealed_device": "cpu"}

    @property
    def recipe(self) -> Any:
        """Return how lists are made, for `roargraph`."""
        roargraph, _ = compiled()
        return roargraph.GraphRecipe(self.neighbours, self.degree, self.pivots, self.build_beam, self.guides)

    def append(self, rows: Rows) -> None:
        batch, heads, new, _ = rows.keys.shape
        first, group = self.parent.rows, 1 if rows.queries is None else rows.queries.shape[2]
        self._extend(rows, heads * group)
        without = 0
        for b in range(batch):
            valid = int((rows.positions[b] >= 0).sum())
            # Padding is in no list, and counts as attached.
            self.parent.full[b, :, first + valid : first + new] = torch.arange(first + valid, first + new)
            if not valid:
                continue
            sampled = None if rows.query_positions is None else rows.query_positions[b] >= 0
            for h in range(heads):
                fresh = rows.keys[b, h, :valid].float()
                keys = joined(self.stored_keys()[b, h, :first], rows.keys[b, h, :valid]).float() if first else fresh
                for g in range(group):
                    queries = fresh[:0] if rows.queries is None else rows.queries[b, h, g][sampled].float()
                    without += self._link(b, h * group + g, keys.contiguous(), queries, first)
        if without:
            warn_of_keys_as_queries(self, without, batch * heads * group)

    def _extend(self, rows: Rows, graphs: int) -> None:
        """Make room for the new rows, without any list."""
        batch, _, new, size = rows.keys.shape
        opening, sampled = self.parent.rows == 0, 0 if rows.queries is None else rows.queries.shape[3]
        self.adjacency.append(torch.full((batch, graphs, new, self.degree), -1, dtype=torch.int32))
        self.parent.append(torch.full((batch, graphs, new), -1, dtype=torch.int32))
        self.bias.append(torch.zeros(batch, graphs, new))
        if opening:
            self.entry.append(torch.full((batch, graphs, 1), -1, dtype=torch.int32))
            if self.metric == "query":
                self.root.append(torch.zeros(batch, graphs, size, size))
            sampled = sampled or new
        guides = min(self.guides - self.guide.rows, sampled)
        self.guide.append(torch.zeros(batch, graphs, guides, size))
        self.lists.append(torch.full((batch, graphs, guides, self.neighbours), -1, dtype=torch.int32))
        self.scores.append(torch.full((batch, graphs, guides, self.neighbours), -torch.inf))

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        check_no_order(order)
        batch, heads, new, size = rows.keys.shape
        group, sampled = (1, 0) if rows.queries is None else rows.queries.shape[2:4]
        graphs, guides = (batch, heads * group), min(self.guides, sampled or new)
        wanted = {
            "adjacency": (torch.int32, (*graphs, new, self.degree)),
            "parent": (torch.int32, (*graphs, new)),
            "bias": (torch.float32, (*graphs, new)),
            "entry": (torch.int32, (*graphs, 1)),
        }
        if guides:
            lists = (*graphs, guides, self.neighbours)
            wanted |= {"guide": (torch.float32, (*graphs, guides, size))}
            wanted |= {"lists": (torch.int32, lists), "scores": (torch.float32, lists)}
        if self.metric == "query":
            wanted["root"] = (torch.float32, (*graphs, size, size))
        check_tensors(state, wanted)
        check_finite(state, "bias", "guide", "root")
        valid = (rows.positions >= 0).sum(1).cpu()
        check_lists(state, "adjacency", valid)
        if guides:
            check_lists(state, "lists", valid)
            check_scored(state, "lists", "scores")
        for b, count in enumerate(valid.tolist()):
            for lists_of, parent, entry in zip(*(state[n][b] for n in ("adjacency", "parent", "entry")), strict=True):
                _check_tree(lists_of[:count], parent.long(), int(entry), count)

    def _link(self, b: int, s: int, keys: Tensor, queries: Tensor, first: int) -> bool:
        """Take `keys` `[N,D]` from `first` on into graph s of sequence b, and return whether they had to serve as
        queries."""
        roargraph, build_and_search = compiled()
        graph = roargraph.Graph(
            *(state.full[b, s].numpy() for state in (self.adjacency, self.parent, self.bias)),
            int(self.entry.full[b, s, 0]),
            *(state.data[b, s].numpy() for state in (self.guide, self.lists, self.scores)),
        )
        if graph.entry >= 0:
            points = self._points(keys, b, s).numpy()
            with build_and_search.ONE_AT_A_TIME:
                roargraph.grow(graph, keys.numpy(), points, self._guiding(queries).numpy(), first, self.recipe)
            return False
        keys = keys[first:]  # what comes before is padding
        with build_and_search.ONE_AT_A_TIME:
            made, without = self._built(keys, queries, b, s)
        few, known = min(len(made.guides), len(graph.guides)), made.lists.shape[1]
        place = slice(first, first + len(keys))
        graph.adjacency[place] = made.adjacency + first * (made.adjacency >= 0)
        graph.parent[place] = made.parent + first
        graph.bias[place] = made.bias
        graph.guides[:few] = made.guides[:few]
        graph.lists[:few, :known] = made.lists[:few] + first * (made.lists[:few] >= 0)
        graph.scores[:few, :known] = made.scores[:few]
        self.entry.full[b, s] = made.entry + first
        return without

    def _points(self, keys: Tensor, b: int, s: int) -> Tensor:
        """Return keys `[N,D]` as the points between which graph s of sequence b measures distances, `[N,..]`."""
        return keys @ self.root.data[b, s] if self.metric == "query" else keys

    def _guiding(self, queries: Tensor) -> Tensor:
        """Return those of the decode queries `[Q,D]` that link keys which come later."""
        return queries

    def _built(self, keys: Tensor, queries: Tensor, b: int, s: int) -> tuple[Any, bool]:
        """Return the `roargraph.Graph` over a prompt's keys `[N,D]`, and whether they had to serve as queries."""
        roargraph, _ = compiled()
        guiding = queries if len(queries) else keys
        if self.metric == "query":
            self.root.data[b, s] = root_of_moment(guiding)
        points = self._points(keys, b, s)
        made = roargraph.build(keys.numpy(), points.numpy(), guiding.contiguous().numpy(), self.recipe)
        return made, not len(queries)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        _, build_and_search = compiled()
        batch, heads, group, size = query.shape
        rows = self.parent.rows
        keys, base = self._flat(group)
        graphs = self.adjacency.full.shape[1]
        which = torch.arange(batch)[:, None] * graphs + torch.arange(heads * group) * graphs // (heads * group)
        count = min(budget, rows)
        build_and_search.parts()
        with build_and_search.ONE_AT_A_TIME:
            nearest, scanned, expanded = build_and_search.search_heads(
                keys,
                base.numpy(),
                self.adjacency.full.flatten(0, 1).numpy(),
                which.flatten().numpy(),
                query.float().reshape(-1, size).contiguous().numpy(),
                self.entry.data.flatten().numpy(),
                rows,
                min(max(self.beam, budget), rows),
                count,
            )
        ids = torch.from_numpy(nearest).view(batch, heads * group, count)
        if not step.counted:
            return Selection.tokens(ids)
        scored = torch.from_numpy(scanned).view(batch, heads * group)
        lists = torch.from_numpy(expanded).view(batch, heads * group)
        read = scored * size * self.bytes_of(self.stored_keys()) + lists * self.degree * 4
        return Selection.tokens(ids, scored, read.view(batch, heads, group).sum(-1))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        rows, width = min(budget, sealed), self.bytes_of(query)
        return walk_scan(query, sealed, rows, beam=self.beam, degree=self.degree, width=width, operators=self.operators)

    def _flat(self, group: int) -> tuple[Any, Tensor]:
        """Return the stored keys of all heads as one list of rows for compiled code, and where each query head's
        begin."""
        stored = self.stored_keys()
        batch, heads, rows, size = stored.shape
        step_b, step_h, step_n, step_d = stored.stride()
        if (step_n, step_d) != (size, 1) or step_b % size or step_h % size:
            stored = stored.contiguous()
            step_b, step_h = heads * rows * size, rows * size
        last = (batch - 1) * step_b // size + (heads - 1) * step_h // size + rows
        flat = stored.as_strided((last, size), (size, 1))
        base = torch.arange(batch)[:, None] * (step_b // size) + torch.arange(heads) * (step_h // size)
        bits = compiled()[1].BITS.get(flat.dtype)
        return (flat if bits is None else flat.view(bits)).numpy(), base.repeat_interleave(group, 1).flatten()


def _check_tree(adjacency: Tensor, parent: Tensor, entry: int, valid: int) -> None:
    """Refuse what is no tree over the first `valid` keys whose root is the entry and whose edges are in the lists:
    ValueError.

    Searches begin at the entry, and insertions go down the tree: in a circle they would not end.

    Args:
        adjacency: `[valid,W]`.
        parent: `[N]`, each row of padding its own.
    """
    rest = torch.arange(valid, len(parent))
    if not torch.equal(parent[valid:], rest) or not (0 <= entry < valid or (entry == -1 and not valid)):
        raise ValueError(f"the entry {entry} or the tree does not fit {valid} keys of {len(parent)} rows")
    parent, key = parent[:valid], torch.arange(valid)
    if not valid:
        return
    if int(parent.min()) < 0 or int(parent.max()) >= valid or int(parent[entry]) != entry:
        raise ValueError(f"parents are keys 0 to {valid - 1}, and the entry's is itself")
    above = parent
    for _ in range(valid.bit_length()):
        above = above[above]
    listed = (adjacency[parent] == key[:, None]).any(1) | (key == entry)
    if not bool((above == entry).all()) or not bool(listed.all()):
        raise ValueError("a key is not reached from the entry")


def joined(old: Tensor, new: Tensor) -> Tensor:
    """Return `old` `[n,D]` and `new` `[m,D]` one after the other: a view where they lie so, as in a cache, else a
    copy."""
    follows = old.data_ptr() + old.nbytes == new.data_ptr() and old.is_contiguous() and new.is_contiguous()
    same = old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()
    if follows and same:
        return old.as_strided((len(old) + len(new), old.shape[1]), old.stride())
    return torch.cat([old, new])


def compiled():  # type: ignore[no-untyped-def]
    """Return the modules in compiled code, loaded when the first instance is made."""
    load_faiss()
    try:
        from sparseattn.kernels.graph import build_and_search, roargraph
    except ImportError as error:
        raise ImportError(
            "RetrievalAttention searches its graph in code compiled by numba, which is not installed: "
            "pip install 'sparseattn[numba,faiss]'"
        ) from error
    return roargraph, build_and_search
