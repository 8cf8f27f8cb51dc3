"""docs/memory.md predicts what a cache holds to the byte, for every selector, and what a step takes besides at most."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Foreseen, Heaviest, by_case, drawn, heads

pytest.importorskip("faiss")
pytest.importorskip("numba")

from benchmarks.measure import Temporaries
from sparseattn import (
    HNSW,
    IVF,
    PQ,
    SAAP,
    SELECTORS,
    DoubleSparsity,
    Exact,
    Fier,
    FreeKV,
    InfiniGen,
    InfLLM,
    Kascade,
    KMeans,
    KVCache,
    Loki,
    LowBit,
    MagicPIG,
    Moments,
    PageMass,
    ParisKV,
    Quest,
    RetrievalAttention,
    RetroInfer,
    RocketKV,
    Selector,
    SparQ,
    Tailed,
    TopP,
    TwoStage,
    Unique,
    VAttention,
    decode,
    make_selector,
)
from sparseattn.cache.query_buffers import sampled
from sparseattn.kernels import implementations
from sparseattn.kernels.quantized_keys import packing
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.hashing.projection_base import Hashed
from sparseattn.selectors.pages.direction_base import Directions
from sparseattn.selectors.tokens.codebook_base import Coded

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PAGE = (Path(__file__).parent.parent / "docs" / "memory.md").read_text()
HEADER = 512  # bytes that faiss writes before an index
STATES = {"its part of the artefact": ("model",), "table": ("table",)}
MAKE = {
    "kascade": lambda: Kascade(anchors=[0]),
    "saap": lambda: drawn(SAAP, probes=3),
    "saap-context": lambda: drawn(SAAP, probes=3, context=0.5),
    "kmeans": lambda: drawn(KMeans, probes=3),
    "moments": lambda: drawn(Moments, probes=3),
    "quest-int8": lambda: Quest(8, int8=True),
    "retrieval": lambda: RetrievalAttention(32, 10, 4, guides=50),
    "retrieval-query": lambda: RetrievalAttention(32, 10, 4, metric="query", share=0.1),
    "magicpig-few": lambda: MagicPIG(4, 30),
    "infinigen": lambda: Foreseen(),
    "infllm": lambda: InfLLM(16),
    "lowbit": lambda: LowBit(rows=16),
    "lowbit-scales": lambda: LowBit(rows=16, scales=8),
    "lowbit-page": lambda: LowBit(4, 16, 8, "max"),
    "fier-each": lambda: Fier(16, "each"),
    "pq-each": lambda: PQ(8, 4, 300, 1, "each"),
    "sparq-mean": lambda: SparQ(8, True),
    "loki-each": lambda: Loki(5, group="each"),
    "topp": lambda: TopP(rows=16),
    "twostage": lambda: TwoStage(rows=16),
    "twostage-union": lambda: TwoStage(Quest(8, "each"), 3, rows=16),
    "bridge": lambda: make_selector("bridge:probes=2,neighbours=16,guides=50"),
    "ivf": lambda: IVF(lists=8, probes=2),
    "hnsw": lambda: HNSW(degree=8, build_beam=20, beam=20),
    "hnsw-l2": lambda: HNSW(degree=8, build_beam=20, beam=20, metric="l2"),
}
NAMES = sorted({*SELECTORS, *MAKE})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table below a heading of the page."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def formulas(name: str) -> dict[tuple[str, ...], str]:
    """State attributes of a selector -> formula of their bytes, of the table of what is held."""
    found = {}
    for selector, state, _, formula in rows_of("Held"):
        only = re.search(r"`(\w+)=(?:True|8)`", state)  # of a selector so made
        if selector == name.partition("-")[0] and (only is None or only[1] in name):
            words = re.sub(r" \(.*\)", "", state)
            found[STATES.get(words, tuple(words.split(", ")))] = formula.strip("`")
    return found


def value(formula: str, letters: dict[str, int]) -> int:
    """A formula of the page in numbers."""
    return eval(formula, {"__builtins__": {}}, letters)


def made(name: str) -> Selector:
    return MAKE[name]() if name in MAKE else SELECTORS[name]()


def filled(name: str, dtype: torch.dtype, batch: int = 2, apart: str | None = None) -> tuple[KVCache, torch.Tensor]:
    """A cache through a prefill, in two sequences of different length, and decoding with several seals."""
    first, last = 1100, 1200
    queries, keys, values = heads(batch, 2, 2, last, 16, dtype)
    cache = KVCache(made(name), sink=4, window=16, seal=32, sealed_device=apart, check=False)
    positions = torch.arange(first).expand(batch, -1).clone()
    positions[-1, :500] = -1
    positions[-1, 500:] -= 500
    cache.append(keys[:, :, :first], values[:, :, :first], queries[:, :, :, :first], positions)
    cache.seal()
    for t in range(first, last):
        cache.append(keys[:, :, t : t + 1], values[:, :, t : t + 1], queries[:, :, :, t : t + 1])
        cache.seal()
    query = queries[:, :, :, -1].contiguous()
    decode(query, cache, 64)
    return cache, query


@pytest.mark.parametrize(("bits", "group", "size"), [(8, 32, 40), (4, 16, 15)])
def test_rounded_rows_take_what_the_page_says(bits: int, group: int, size: int) -> None:
    _, keys, values = heads(2, 2, 2, 400, size, torch.bfloat16)
    cache = KVCache("quest", sink=4, window=16, seal=32, bits=bits, group=group)
    cache.append(keys, values)
    cache.seal()
    near = cache.sink + cache.window + (400 - cache.sink - cache.window) % cache.unit
    letters = {"B": 2, "H": 2, "D": size, "e": 2, "U": near, "Z": 400 - near, "q": bits, "g": group}
    formula = next(row[3].strip("`") for row in rows_of("Held") if row[0] == "all with `bits`")
    assert cache.nbytes["kv"] == value(formula, letters)


def waiting_queries(cache: KVCache, b: int) -> int:
    """Queries of sequence b's rows that are not sealed; its tokens are at positions 0, 1, 2, .."""
    rows, sealed = int(cache.lengths[b]), int(cache.sealed[b])
    return int(sampled(torch.arange(cache.sink + sealed, rows), cache.selector.queries_share).sum())


def letters_of(cache: KVCache, query: torch.Tensor) -> dict[str, int]:
    """What the page's letters stand for in a cache."""
    selector = cache.selector
    batch, kv, group, size = query.shape
    near, zone = cache.keys.shape[2], cache.sealed_keys.shape[2]
    letters = {"B": batch, "H": kv, "G": group, "D": size, "e": query.element_size(), "U": near, "Z": zone}
    letters |= {"N": near if cache.sealed_device is None else near + zone, "w": int(query.element_size() < 4)}
    letters["O"] = cache.sink + cache.window  # where the unit is 1
    letters["Q"] = max(map(waiting_queries, [cache] * batch, range(batch)))
    pages, coded = (getattr(selector, name, selector) for name in ("pages", "inside"))
    if isinstance(selector, FreeKV):
        pages, letters["T"] = selector.inner, int(selector.last.parts["length"].sum(-1).max())
    if isinstance(pages, (Quest, InfLLM, Unique, Directions, PageMass)):
        letters["P"] = zone // pages.page
    if isinstance(selector, Directions):
        letters["a"] = selector.form.rank
    if isinstance(selector, (Tailed, RetroInfer)):
        letters["P"] = zone // selector.unit
    if isinstance(selector, RocketKV):
        letters |= {"P": zone // selector.span, "d": selector._channels(size)}
    if isinstance(selector, InfiniGen):
        letters["r"] = selector.turn.data.shape[3]
    if isinstance(coded, LowBit):
        letters |= {"b": 4 * packing.words(size, coded.bits), "L": coded.rows}
    if isinstance(coded, Coded):
        letters |= {"b": coded.codes.full.shape[3], "k": coded.centroids.full.shape[3]}
    if isinstance(selector, SparQ):
        letters["d"] = min(selector.channels, size)
    if isinstance(selector, Loki):
        letters["d"] = selector.basis.data.shape[3]
    if isinstance(selector, DoubleSparsity):
        letters |= {"d": selector.which.data.shape[2], "b": selector.labels.full.shape[3]}
    if isinstance(selector, Partitioned):
        assert selector._here is not None
        classifier = selector._here.partition.classifier
        letters |= {"C": selector._here.buckets, "R": selector.edges.rows, "V": selector.probes}
        letters |= {"F": 0 if classifier is None else classifier.w1.shape[1], "c": query.element_size()}
    if hasattr(selector, "guide"):
        letters |= {"A": selector.guide.data.shape[1], "S": selector.guide.rows, "K": selector.neighbours}
    if hasattr(selector, "degree"):
        letters["W"] = selector.degree
    if isinstance(selector, Hashed):
        letters |= {"t": getattr(selector, "tables", 0), "y": selector.count}
    if isinstance(chooses := selector.inner if isinstance(selector, Kascade) else selector, Exact):
        letters["T"] = chooses.kept.data.shape[-1]
    if isinstance(selector, VAttention):
        letters["T"] = selector.inner.kept.data.shape[-1]
    if hasattr(selector, "probes"):
        letters["V"] = selector.probes
    return letters


@by_case(NAMES, called="name", dtype=DTYPES, apart={"joint": None, "apart": "cpu"})
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_what_is_held_is_what_the_page_says(name: str, dtype: torch.dtype, apart: str | None) -> None:
    cache, query = filled(name, dtype, apart=apart)
    letters, bytes_held = letters_of(cache, query), cache.nbytes
    assert bytes_held.pop("kv") == value(formulas("all")[("keys", "values")], letters)
    books = value(formulas("all")[("positions", "which sealed rows are real")], letters)
    queries = next(row[3].strip("`") for row in rows_of("Held") if row[1] == "queries that wait")
    assert bytes_held.pop("books") == books + value(queries, letters) * bool(cache.selector.queries_share)
    predicted = formulas(name)
    selector = cache.selector
    if isinstance(selector, Partitioned):
        assert selector._here is not None
        part = selector._here.partition
        tensors = [part.centroids, *(part.classifier.tensors().values() if part.classifier else ())]
        assert sum(tensor.nbytes for tensor in tensors) == value(predicted.pop(("model",)), letters)
    if isinstance(selector, (IVF, HNSW)):
        expected = tables_of(selector, predicted.pop(("table",)), letters)
        indexes = letters["B"] * letters["H"]
        assert 0 < bytes_held.pop("table") - expected < HEADER * indexes
    for states, formula in predicted.items():
        counted = sum(bytes_held.pop(state) for state in states)
        optional = (states == ("moments",) and name == "saap") or (states == ("root",) and name == "retrieval")
        assert counted == (0 if optional else value(formula, letters)), states
    assert not any(bytes_held.values()), f"every state of a selector is on the page: {bytes_held}"


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_what_is_freed_is_what_the_page_says(apart: str | None) -> None:
    """And what the prompt's last queries take until they are handed over."""
    queries, keys, values = heads(2, 2, 3, 500, 16)
    cache = KVCache(Heaviest(70), sink=4, window=16, seal=32, rollback=5, sealed_device=apart)
    cache.append(keys, values, queries)
    letters = {"B": 2, "H": 2, "G": 3, "D": 16, "e": 4, "U": 500, "Z": 0, "n": 3, "window": 16, "rollback": 5}
    asked = next(row[3].strip("`") for row in rows_of("Held") if row[1] == "the prompt's last queries")
    books = formulas("all")[("positions", "which sealed rows are real")]
    assert cache.nbytes["books"] == value(books, letters) + value(asked, letters)
    cache.seal()
    letters |= {"Z": 475, "K": 70, "u": 1, "U": 500 if apart is None else 25}
    before = cache.nbytes
    assert before["books"] == value(books, letters)
    after, *freed = (row[1].strip("`") for row in rows_of("Freed"))
    assert cache.compact() == 475 - value(after, letters)
    gone = {name: bytes_held - cache.nbytes[name] for name, bytes_held in before.items()}
    assert gone["kv"] + gone["books"] == value(freed[0 if apart is None else 1], letters)
    assert cache.nbytes["weight"] * 475 == before["weight"] * value(after, letters)


FIXED = ["quest", "quest-int8", "clse", "exact", "random", "saap", "kmeans", "moments", "bridge"]
FIXED += ["infllm", "lowbit", "lowbit-scales", "fier", "selfindex", "pq", "twostage"]
FIXED += ["tailed", "retroinfer", "pqcache", "sparq", "sparq-mean", "doublesparsity", "loki", "rocketkv", "pariskv"]
FIXED += ["kdeformer", "reformer", "magicpig"]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_a_fixed_cache_holds_what_a_full_one_would(name: str) -> None:
    """From the first row on, whatever is stored."""
    queries, keys, values = heads(2, 2, 2, 300, 16)
    cache = KVCache(made(name), sink=4, window=16, seal=32, capacity=1000, fixed=True)
    cache.append(keys, values, queries)
    decode(queries[:, :, :, -1].contiguous(), cache, 64)
    selector = cache.selector
    letters = letters_of(cache, queries[:, :, :, -1])
    unit = selector.unit
    letters |= {"N": 1000, "U": 1000, "Z": 996 // unit * unit, "P": 996 // unit}
    if hasattr(selector, "guides"):
        letters["S"] = selector.guides
    if isinstance(selector, Partitioned):
        letters["R"] = (letters["Z"] // (32 // unit * unit)).bit_length()
    assert cache.keys.nbytes + cache.values.nbytes == value(formulas("all")[("keys", "values")], letters)
    held: dict[str, Any] = dict(selector.buffers())
    for states, formula in formulas(name).items():
        buffers = [held[state] for state in states if state in held]
        if states in (("model",), ("kept",)) or (name, states) in (("saap", ("moments",)), ("bridge", ("real",))):
            continue  # no storage of rows; Exact's last choice; not kept; not read by a step
        assert sum(buffer.full.nbytes for buffer in buffers) == value(formula, letters), states


def tables_of(selector: IVF | HNSW, formula: str, letters: dict[str, int]) -> int:
    """The bytes predicted for faiss's indexes, sequence by sequence, as these hold real rows only."""
    import faiss

    total = 0
    for indexes in selector.table.indexes:
        for index in indexes:
            one = letters | {"B": 1, "H": 1, "Z": index.ntotal}
            if isinstance(selector, HNSW):
                levels = faiss.vector_to_array(index.hnsw.levels)
                above = int((levels - 1).sum())
                assert above == pytest.approx(index.ntotal / (selector.degree - 1), rel=0.3)
                one |= {"X": above * selector.degree, "D": index.d}
            else:
                one["Y"] = index.nlist
            total += value(formula, one)
    return total


@by_case(NAMES, called="name", dtype=DTYPES, budget={"32": 32, "512": 512})
@pytest.mark.filterwarnings("ignore:.*no queries of the prefill:UserWarning")
def test_temporaries_are_at_most_what_the_page_says(name: str, dtype: torch.dtype, budget: int) -> None:
    cache, query = filled(name, dtype)
    bounds = {row[0]: row[1].strip("`") for row in rows_of("Temporaries of a step")}
    with Temporaries() as selecting:
        selection = cache.select(query, budget)
    with Temporaries() as step:
        decode(query, cache, budget)
    letters = letters_of(cache, query)
    dense = int((cache.bounds.rows - cache.bounds.sealed + cache.bounds.sink).max())
    letters |= {"M": selection.start.shape[2] * selection.span, "E": dense} | proposed(name, cache, letters, budget)
    chosen = value(bounds[f"{name.partition('-')[0]}: select"], letters)
    attended = value(bounds["attend"], letters | {"A": selection.start.shape[1]})
    assert selecting.peak <= chosen
    assert step.peak <= chosen + attended


def proposed(name: str, cache: KVCache, letters: dict[str, int], budget: int) -> dict[str, int]:
    """The rows that a first stage proposes to a list, where there is one, or its candidates."""
    if isinstance(cache.selector, ParisKV):
        return {"J": max(math.ceil(0.5 * letters["Z"]), budget)}
    if not isinstance(cache.selector, TwoStage):
        return {}
    if isinstance(cache.selector, TopP):
        return {"J": math.ceil(cache.selector.propose * letters["Z"] / 16) * 16}
    lists = letters["G"] if name.endswith("union") else 1
    return {"J": min(cache.selector.times * budget, letters["Z"]) * lists}


WITHOUT = [
    "lowbit",
    "lowbit-scales",
    "lowbit-page",
    "fier-each",
    "selfindex",
    "pq",
    "twostage",
    "twostage-union",
    "topp",
]
WITHOUT += ["pqcache", "sparq-mean", "doublesparsity", "loki-each"]


@by_case(WITHOUT, called="name", dtype=DTYPES)
def test_temporaries_without_numba_are_at_most_what_the_page_says(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, query = filled(name, dtype)
    bounds = {row[0]: row[1].strip("`") for row in rows_of("Temporaries of a step")}
    monkeypatch.setattr(implementations, "why_not_numba", lambda device, dtype: "not here")
    with Temporaries() as selecting:
        selection = cache.select(query, 512)
    letters = letters_of(cache, query)
    letters |= {"M": selection.start.shape[2] * selection.span} | proposed(name, cache, letters, 512)
    step = f"{name.partition('-')[0]}: select"
    assert selecting.peak <= value(bounds.get(f"{step} without numba", bounds[step]), letters)


def long_enough(name: str, dtype: torch.dtype) -> tuple[KVCache, torch.Tensor, int]:
    """One sequence of 9,000 rows, to be asked for 640."""
    queries, keys, values = heads(1, 2, 2, 9000, 16, dtype)
    cache = KVCache(made(name), sink=4, window=16, check=False)  # what a step takes is without the check
    cache.append(keys, values)
    cache.seal()
    return cache, queries[:, :, :, -1].contiguous(), 640


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["window", "quest", "exact", "random", "saap", "kmeans", "moments"])
def test_the_workspace_is_what_the_page_says(name: str, dtype: torch.dtype) -> None:
    """Of the step measured here, and in the record at the page's shape."""
    row = next(row for row in rows_of("Workspace of a step") if row[0] == name)
    formula = row[1 if dtype == torch.float32 else 2].strip("`")
    shape = {"B": 1, "H": 8, "G": 4, "D": 128, "C": 1024, "P": (131_072 - 68) // 16, "Z": 131_072 - 68, "q": 128}
    record = json.loads((RESULTS / "speed-cpu.json").read_text())
    ways = next(one["selectors"] for one in record["results"] if f"torch.{one['dtype']}" == str(dtype))
    measured = next(way for way in ways if way["selector"] == name)["memory"]["bytes"]["workspace"]
    predicted = value(formula, shape)
    assert abs(predicted - measured) <= 200
    assert row[3 if dtype == torch.float32 else 4] == f"{predicted / 131.072 / 1024:.1f}"
    if name in ("saap", "kmeans", "moments"):
        return  # 12 buckets are too few for choosing to take more than attending
    cache, query, budget = long_enough(name, dtype)
    decode(query, cache, budget)
    with Temporaries() as seen:
        decode(query, cache, budget)
    letters = letters_of(cache, query) | {"q": budget // 16}
    assert abs(seen.peak - value(formula, letters)) <= 200


def test_the_table_of_1000_tokens_follows_from_the_formulas() -> None:
    letters: dict[str, Any] = {"B": 1, "H": 8, "G": 4, "D": 128, "e": 2, "N": 131_072, "U": 131_072, "Q": 0}
    letters |= {"C": 1024, "R": 1, "F": 1024, "O": 68, "c": 4, "A": 32, "T": 2048}
    own = {
        "bridge": {"S": 2048, "K": 256},
        "retrieval": {"S": 2048, "K": 100, "W": 32},
        "robustvamana": {"W": 32},
        "infinigen": {"r": 26},
        "hnsw": {"W": 32},
        "lowbit": {"b": 32, "L": 64},
        "fier": {"b": 16, "L": 32},
        "selfindex": {"b": 16, "k": 16},
        "pq": {"b": 16, "k": 256},
        "magicpig": {"t": 150},
        "pqcache": {"b": 2, "k": 64},
        "doublesparsity": {"b": 16, "d": 32},
        "loki": {"d": 32},
        "quad": {"a": 2},
        "clse": {"a": 2},
        "ellipsoid": {"a": 4},
        "twostage": {"b": 32, "L": 64},
        "topp": {"b": 64, "L": 64},
        "vattention": {"T": 1024},  # at most half of the budget
    }
    kinds = ("KV", "books", "metadata", "index")
    named = {row[0]: [float(cell.removesuffix(" %")) for cell in row[1:]] for row in rows_of("For 1,000 tokens")}
    assert set(named) == set(SELECTORS)
    for name, cells in named.items():
        here = letters | own.get(name, {})
        method = SELECTORS[name]()
        unit, page = method.unit, getattr(method, "page", 16) or method.span
        here["Z"] = (131_072 - 68) // unit * unit
        here |= {"P": here["Z"] // page, "Y": 1 << int(4 * here["Z"] ** 0.5).bit_length() - 1}
        here["X"] = 8 * here["Z"] / 31 * 32
        total = dict.fromkeys((*kinds, "model"), 0.0)
        for selector, state, kind, formula in rows_of("Held"):
            optional = "(" in state and not (name == "moments" or selector == "all")
            if (selector == name and not optional) or (selector == "all"):
                total[kind] += value(formula.strip("`"), here)
        expected = [total[kind] / 131.072 / 1024 for kind in kinds]
        expected.append(100 * (total["metadata"] + total["index"]) / total["KV"])
        assert cells == [round(one, 1) for one in expected], name
    classifier = next(row[3].strip("`") for row in rows_of("Held") if row[0] == "saap" and row[2] == "model")
    centroids = next(row[3].strip("`") for row in rows_of("Held") if row[0] == "kmeans" and row[2] == "model")
    assert f"{value(classifier, letters) / 2**20:.1f} MiB of SAAP's classifiers" in PAGE
    assert f"{value(classifier, letters | {'c': 2}) / 2**20:.1f} MiB where their\nweights are of 16 bits" in PAGE
    assert f"{value(centroids, letters) / 2**20:.1f} MiB of centroids" in PAGE
