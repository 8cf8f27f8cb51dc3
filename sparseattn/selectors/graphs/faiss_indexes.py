"""Flat, IVF and HNSW of faiss over the keys, RetrievalAttention's rivals (https://arxiv.org/abs/2409.10516)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparseattn.core.row_buffer import State
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.kernels.nearest import in_threads, load_faiss
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_least, check_most
from sparseattn.selectors.graphs.search_cost import walk_scan

KEYS_PER_LIST = 16  # fewer, and k-means only repeats the keys

_COUNTING = threading.Lock()  # faiss counts HNSW's work once for the whole process


def _host(part: Tensor) -> Any:
    """Return what faiss reads: a contiguous float32 numpy array on the CPU, a view where `part` is that already."""
    return part.detach().to("cpu", torch.float32).contiguous().numpy()


class Work(NamedTuple):
    """What a search of one KV head took, where the data decide it.

    Args:
        scanned: keys and centroids scored, for each query head.
        read: bytes, of all query heads.
    """

    scanned: list[int]
    read: int


class IndexTable(State):
    """One faiss index for each sequence and KV head, in host memory.

    Attributes:
        indexes: `[B][H]`, None until the first valid key of a sequence.
    """

    def __init__(self) -> None:
        self.indexes: list[list[Any]] = []
        self.rows = 0

    def extend(self, keys: Tensor, valid: Tensor, grow: Callable[[Any, Any], Any]) -> None:
        """Show `grow(index or None, keys [n,D] float32)` the valid keys of every head, and keep the index it returns.

        Args:
            keys: `[B,H,n,D]`.
            valid: `[B,n]` bool.
        """
        (batch, heads, new, _), valid = keys.shape, valid.cpu()
        self.indexes = self.indexes or [[None] * heads for _ in range(batch)]

        def build(place: tuple[int, int]) -> None:
            b, h = place
            self.indexes[b][h] = grow(self.indexes[b][h], _host(keys[b, h][valid[b]]))

        in_threads(build, [(b, h) for b in valid.any(1).nonzero()[:, 0].tolist() for h in range(heads)])
        self.rows += new

    def fresh(self) -> IndexTable:
        return IndexTable()

    def clone(self) -> IndexTable:
        copy = self.fresh()
        copy.rows, copy.indexes = self.rows, [self._copy(b) for b in range(len(self.indexes))]
        return copy

    def take(self, index: Tensor) -> None:
        if self.indexes:
            beams = index.tolist()
            self.indexes = [self._copy(b) if b in beams[:i] else self.indexes[b] for i, b in enumerate(beams)]

    def _copy(self, b: int) -> list[Any]:
        return [None if index is None else load_faiss().clone_index(index) for index in self.indexes[b]]

    def reset(self) -> None:
        self.rows, self.indexes = 0, []

    def to(self, device: torch.device | str) -> None:
        """Stay in host memory."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the indexes written out: float32 keys, and lists or links."""
        made = [index for heads in self.indexes for index in heads if index is not None]
        return sum(len(load_faiss().serialize_index(index)) for index in made)


class _FaissSearch(Selector):
    """faiss on the host: for each sequence and KV head, every query head takes its own best rows by inner product.

    Keys, queries and chosen rows are copied from and to a GPU; keys of other dtypes are searched in float32.
    """

    operators = 50

    def __init__(self) -> None:
        load_faiss()

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        batch, heads, group, _ = query.shape
        slots = min(budget, step.valid.shape[1])
        queries, valid = _host(query), step.valid.cpu()
        ids = torch.full((batch, heads, group, slots), -1)
        scanned = torch.zeros(batch, heads, group, dtype=torch.int64)
        read, data_decide = torch.zeros(batch, heads, dtype=torch.int64), False
        for b in range(batch):
            # The stored row of the sequence's i-th valid key, which faiss calls i; nonzero takes 0.5 ms of 131,072 rows
            place = torch.arange(valid.shape[1]) if bool(valid[b].all()) else valid[b].nonzero()[:, 0]
            for h in range(heads if len(place) else 0):
                nearest, work = self._search(b, h, place, queries[b, h], slots, step.counted)
                ids[b, h] = torch.where(nearest < 0, -1, place[nearest.clamp(min=0)])
                if work is not None:
                    scanned[b, h], read[b, h], data_decide = torch.tensor(work.scanned), work.read, True
        chosen = Selection.tokens(ids.flatten(1, 2).to(query.device))
        if not data_decide:
            return chosen
        return replace(chosen, scanned=scanned.flatten(1, 2).to(query.device), scan_bytes=read.to(query.device))

    @abstractmethod
    def _search(
        self, b: int, h: int, place: Tensor, queries: Any, slots: int, counted: bool
    ) -> tuple[Tensor, Work | None]:
        """Return the best valid keys of one KV head for its queries `[G,D]`.

        Args:
            place: `[n]`, n >= 1, the stored rows of the sequence's valid keys.
            counted: whether what it takes is counted.

        Returns:
            numbers `[G,slots]` int64 of valid keys, -1 where there are no more; what it took, None where that is not
            counted or where `scan` says it.
        """


class Flat(ReadsKeys, _FaissSearch):
    """Scores every sealed key, by `faiss.knn` over the cache's own keys: exact, what the others are measured against.

    Costs nothing to keep. float32 keys on the CPU are read where they lie; others are converted anew at every query
    (from a GPU, copied too: `Exact` is the one to use there). `scan_bytes`: every valid key once per KV head, at its
    stored size.
    """

    def append(self, rows: Rows) -> None:
        return None

    def _search(self, b: int, h: int, place: Tensor, queries: Any, slots: int, counted: bool) -> tuple[Tensor, None]:
        keys, faiss = self.stored_keys()[b, h], load_faiss()
        if len(place) < len(keys):
            keys = keys[place.to(keys.device)]
        count = min(slots, len(keys))
        best = torch.from_numpy(faiss.knn(queries, _host(keys), count, metric=faiss.METRIC_INNER_PRODUCT)[1])
        return torch.nn.functional.pad(best, (0, slots - count), value=-1), None

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = Scan(sealed, sealed * query.shape[3] * self.bytes_of(query))
        launch = products(query, sealed, query.shape[3], scan.read)
        return self.ranked(query, scan, [launch], (sealed, min(budget, sealed)))


class IVF(_FaissSearch):
    """k-means lists (faiss `IndexIVFFlat`): scores the centroids, then every key in the lists of the best ones.

    The lists are trained by faiss's spherical k-means (10 rounds, on at most 256 keys a list) on the first valid keys
    that a sequence seals, its prompt's; keys sealed later join the nearest of these lists, which are never retrained.
    Keeps a float32 copy of the keys. `scanned`: keys in the visited lists plus centroids, for each query head;
    `scan_bytes`: as many float32 vectors, summed over the query heads, whose lists differ.

    Args:
        lists: lists per KV head; 0: the power of two at or below 4*sqrt(keys trained on). Never more than one for every
            16 of those keys.
        probes: lists that a query visits, all if there are fewer. 512 lists and 150 probes scan the 30% of
            RetrievalAttention's IVF.
        seed: of the first centroids.
    """

    knob = "probes"

    def __init__(self, lists: int = 0, probes: int = 64, seed: int = 0) -> None:
        check_least(lists=(lists, 0), probes=(probes, 1))
        super().__init__()
        self.lists, self.probes, self.seed = lists, probes, seed
        self.table = IndexTable()

    def append(self, rows: Rows) -> None:
        self.table.extend(rows.keys, rows.positions >= 0, self._grow)

    def _grow(self, index: Any, keys: Any) -> Any:
        if index is None:
            faiss, (count, size) = load_faiss(), keys.shape
            lists = self._made(count)
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, lists, faiss.METRIC_INNER_PRODUCT)
            index.cp.seed, index.cp.min_points_per_centroid = self.seed, 1  # below the minimum faiss prints a warning
            index.train(keys)
        index.add(keys)
        return index

    def _made(self, count: int) -> int:
        """Return how many lists so many keys make."""
        lists = self.lists or 1 << int(4 * count**0.5).bit_length() - 1
        return max(min(lists, count // KEYS_PER_LIST), 1)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Predict a step as if lists held as many keys each, and all were the prompt's."""
        lists = self._made(sealed)
        scored = lists + sealed * min(self.probes, lists) / lists
        scan = Scan(scored, 4.0 * query.shape[2] * scored * query.shape[3])
        every = query.shape[:3].numel() * scan.scanned
        launch = Launch("walk", query.shape[:2].numel() * scan.read, entries=every)
        best = int(scan.scanned), min(budget, sealed)
        return self.ranked(query, scan, [launch], best, expected="all lists hold equally many keys")

    def _search(
        self, b: int, h: int, place: Tensor, queries: Any, slots: int, counted: bool
    ) -> tuple[Tensor, Work | None]:
        index = self.table.indexes[b][h]
        index.nprobe = min(self.probes, index.nlist)
        scores, lists = index.quantizer.search(queries, index.nprobe)  # [G,probes]
        nearest = torch.from_numpy(index.search_preassigned(queries, slots, lists, scores)[1])
        if not counted:
            return nearest, None
        scanned = [index.nlist + sum(map(index.get_list_size, visited)) for visited in lists.tolist()]
        return nearest, Work(scanned, sum(scanned) * index.d * 4)


class HNSW(_FaissSearch):
    """A layered graph of near keys (faiss `IndexHNSWFlat`), walked greedily towards the query.

    Keeps a float32 copy of the keys and `8 * degree` bytes of links a key. With `metric="ip"`, links are pruned by
    inner product, so that keys of small norm may lose every link that leads to them, and no beam finds those; none is
    pruned where `degree` is half the keys and `build_beam` all of them. `scanned`: distances computed on all levels,
    faiss's own count for each query head and the entry point, which it leaves out. faiss counts for the whole process:
    other HNSW searches of the same process at the same time would be added. `scan_bytes`: that many float32 vectors,
    and for each node walked through the `2 * degree` neighbours (int32) that it has room for; summed over the query
    heads.

    Args:
        degree: links of a key, twice as many on the lowest level (faiss's M); 2 or more.
        build_beam: candidates kept when a key is linked (efConstruction).
        beam: candidates kept when a query is searched (efSearch); at least the budget is.
        metric: "ip", inner product throughout, as RetrievalAttention's rival; or "l2", a stronger rival: one more
            dimension gives all keys the norm of the largest, and distance then ranks them as inner products do
            (Bachrach et al. 2014, https://doi.org/10.1145/2645710.2645741). Keys sealed later that are larger still
            rank too low.
    """

    knob = "beam"

    def __init__(self, degree: int = 32, build_beam: int = 200, beam: int = 128, metric: str = "ip") -> None:
        check_least(degree=(degree, 2), build_beam=(build_beam, 1), beam=(beam, 1))
        check_most(degree=degree, build_beam=build_beam)
        super().__init__()
        if metric not in ("ip", "l2"):
            raise ValueError(f"metric is ip or l2, got {metric!r}")
        self.degree, self.build_beam, self.beam, self.metric = degree, build_beam, beam, metric
        self.table = IndexTable()

    def append(self, rows: Rows) -> None:
        self.table.extend(rows.keys, rows.positions >= 0, self._grow)

    def _grow(self, index: Any, keys: Any) -> Any:
        if self.metric == "l2":
            rows = torch.from_numpy(keys)
            norms = rows.square().sum(1)  # [n]
            largest = norms.max() if index is None else torch.from_numpy(index.reconstruct(0)).square().sum()
            keys = torch.cat([rows, (largest - norms).clamp(min=0).sqrt()[:, None]], 1).numpy()
        if index is None:
            faiss = load_faiss()
            metric = faiss.METRIC_L2 if self.metric == "l2" else faiss.METRIC_INNER_PRODUCT
            index = faiss.IndexHNSWFlat(keys.shape[1], self.degree, metric)
            index.hnsw.efConstruction = self.build_beam
        index.add(keys)
        return index

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        rows, degree = min(budget, sealed), 2 * self.degree
        return walk_scan(query, sealed, rows, beam=self.beam, degree=degree, width=4, operators=self.operators)

    def _search(
        self, b: int, h: int, place: Tensor, queries: Any, slots: int, counted: bool
    ) -> tuple[Tensor, Work | None]:
        faiss, index = load_faiss(), self.table.indexes[b][h]
        if self.metric == "l2":
            queries = torch.nn.functional.pad(torch.from_numpy(queries), (0, 1)).numpy()
        params, stats = faiss.SearchParametersHNSW(efSearch=max(self.beam, slots)), faiss.cvar.hnsw_stats
        nearest, scanned, steps = [], [], 0
        for g in range(len(queries)):
            with _COUNTING:
                stats.reset()
                nearest.append(torch.from_numpy(index.search(queries[g : g + 1], slots, params=params)[1]))
                scanned.append(stats.ndis + 1)
                steps += stats.nhops
        work = Work(scanned, sum(scanned) * index.d * 4 + steps * 2 * self.degree * 4)
        return torch.cat(nearest), work if counted else None
