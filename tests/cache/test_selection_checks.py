"""No wrong selector looks good: what the contract forbids ends a comparison with a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, MagicPIG, Rows, Selection, Selector, Tail, decode, evaluate, make_selector
from sparseattn.cache.selection_checks import ContractError, check, check_tail
from sparseattn.core.context import StepContext
from sparseattn.core.step_cost import Scan
from sparseattn.evaluation.recall_sweep import curve
from sparseattn.traces.synthetic import synthetic
from sparseattn.training.index_run import IndexRecipe, train_index
from tests.command import run

B, H, G, D = 2, 2, 3, 8
AT = torch.tensor([70, 71])


class Wrong(Selector):
    """Names the spans that `name(sealed, budget)` gives, `[S]` each, in the last KV head; others are honest."""

    span = 4

    def __init__(self, name: Callable[[int, int], tuple[list[int], list[int]]]) -> None:
        self.name, self.sealed = name, 0

    def append(self, rows: Rows) -> None:
        self.sealed += rows.keys.shape[2]

    def reset(self) -> None:
        super().reset()
        self.sealed = 0

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        start, length = (torch.tensor(part, dtype=torch.int32) for part in self.name(self.sealed, budget))
        honest = torch.zeros(*query.shape[:2], len(start), dtype=torch.int32)
        honest_length = honest.clone()
        honest[..., -1, :], honest_length[..., -1, :] = start, length
        return Selection(honest, honest_length, 4)

    def __repr__(self) -> str:
        return "Wrong()"


WRONG = {
    "more than its budget": (lambda n, budget: (list(range(0, n - 3, 4)), [4] * (n // 4)), r"it names \d+ rows for a"),
    "past the end": (lambda n, budget: ([n - 2], [4]), r"it names rows \d+ to \d+, and the rows it was shown are 0 to"),
    "before the start": (lambda n, budget: ([-1], [2]), r"it names rows -1 to 0"),
    "twice": (lambda n, budget: ([0, 8, 2], [4, 4, 1]), r"names row 2 of which another span holds some"),
    "the same span": (lambda n, budget: ([8, 8], [4, 4]), r"names rows 8 to 11 of which another"),
    "a long span": (lambda n, budget: ([0], [5]), r"a span of 5 rows from row 0 on, where a span has 0 to 4"),
    "a negative span": (lambda n, budget: ([0], [-1]), r"a span of -1 rows"),
}
CASES = pytest.mark.parametrize(("name", "sentence"), WRONG.values(), ids=WRONG)


@CASES
def test_evaluate_refuses(name: Callable, sentence: str) -> None:
    trace = synthetic(96, heads=H, group=G, size=D, layers=1)
    where = r"^Wrong\(\) broke the contract \(layer 0, position 92, sequence 0, KV head 1\): "
    with pytest.raises(ContractError, match=where) as error:
        evaluate(trace, Wrong(name), 16, sink=2, window=4, last=4)
    assert error.match(sentence)


@CASES
def test_recall_refuses(name: Callable, sentence: str) -> None:
    layer = synthetic(96, heads=H, group=G, size=D, layers=1).layer(0)
    with pytest.raises(ContractError, match=sentence):
        curve(Wrong(name), layer.keys, layer.query[:, :, -4:], k=16)


@CASES
def test_a_cache_refuses_if_asked(name: Callable, sentence: str) -> None:
    keys, values = torch.randn(2, B, H, 64, D)
    query = torch.randn(B, H, G, D)
    checked = KVCache(Wrong(name), sink=2, window=4, seal=4, check=True)
    checked.append(keys, values)
    with pytest.raises(ContractError, match=sentence):
        decode(query, checked, 16)
    assert checked.clone().check, "copies are checked too"


def test_decode_does_not_look() -> None:
    cache = KVCache(Wrong(WRONG["more than its budget"][0]), sink=2, window=4, seal=4, check=False)
    cache.append(*torch.randn(2, B, H, 64, D))
    assert torch.isfinite(decode(torch.randn(B, H, G, D), cache, 16)).all()


def test_padding_is_refused() -> None:
    """The shorter sequence of a batch has padding in its sealed zone, which an honest selector never names."""

    def every_row(n: int, budget: int) -> tuple[list[int], list[int]]:
        return list(range(0, n, 4)), [4] * (n // 4)

    cache = KVCache(Wrong(every_row), sink=2, window=4, seal=4, check=True)
    at = torch.stack([torch.arange(64), torch.arange(64) - 40]).clamp(min=-1)
    cache.append(*torch.randn(2, B, H, 64, D), None, at)
    with pytest.raises(
        ContractError, match=r"position 23, sequence 1, KV head 1\): it names rows 16 to 19, among them"
    ):
        decode(torch.randn(B, H, G, D), cache, None)


def test_shapes_and_types() -> None:
    query, nothing = torch.randn(B, H, G, D), torch.zeros(B, H * G, 1, dtype=torch.int32)
    check(Selection(nothing, nothing, 1), query, AT, 1, 10, None, Exact())
    with pytest.raises(ContractError, match=r"\[2, 1, 1\] for a query \[2, 2, 3, 8\]: B is 2 and Hs is 2 .+ or 6"):
        check(Selection(nothing[:, :1], nothing[:, :1], 1), query, AT, 1, 10, None, Exact())
    with pytest.raises(ContractError, match="returned tuple from select, not a Selection"):
        check((nothing, nothing), query, AT, 1, 10, None, Exact())  # type: ignore[arg-type]
    one = nothing.clone()
    one[1, 5] = 1
    with pytest.raises(
        ContractError, match=r"layer 0, position 71, sequence 1, query head 5\): it names row 9, and was"
    ):
        check(Selection(nothing + 9, one, 1), query, AT, 1, 0, None, Exact())


@pytest.mark.parametrize(
    ("name", "cost", "sentence"),
    [
        ("scan_bytes", torch.full((B, H), -(10**7)), "reports scan_bytes of -10000000: counts are 0 or more"),
        ("scanned", torch.full((B, H), -1), "reports scanned of -1"),
        ("scanned", torch.full((B, H), torch.nan), r"scanned as torch.float32 \[2, 2\]: it is None or int64 \[B,Hs\]"),
        ("scan_bytes", torch.zeros(B, 1, dtype=torch.int64), r"int64 \[2, 1\]: it is None or int64 \[B,H\] = \[2, 2\]"),
    ],
)
def test_costs_are_counts(name: str, cost: Tensor, sentence: str) -> None:
    rows = torch.zeros(B, H, 1, dtype=torch.int32)
    with pytest.raises(ContractError, match=sentence):
        check(Selection(rows, rows, 1, **{name: cost}), torch.randn(B, H, G, D), AT, 1, 10, None, Exact())


@pytest.mark.parametrize("bias", [torch.nan, torch.inf, -torch.inf])
def test_a_bias_is_finite_where_a_slot_is_used(bias: float) -> None:
    query, ids = torch.randn(B, H, G, D), torch.tensor([3, -1]).expand(B, H, -1)
    given = torch.zeros(B, H, 2)
    given[..., 1] = bias
    check(Selection.tokens(ids, bias=given), query, AT, 1, 10, None, MagicPIG())
    given[1, 0, 0] = bias
    with pytest.raises(ContractError, match=r"sequence 1, KV head 0\): the bias of row 3 is NaN or infinite"):
        check(Selection.tokens(ids, bias=given), query, AT, 1, 10, None, MagicPIG())


def test_a_bias_is_declared() -> None:
    query, ids = torch.randn(B, H, G, D), torch.zeros(B, H, 1, dtype=torch.int64)
    with pytest.raises(ContractError, match="with a bias and is no Biases"):
        check(Selection.tokens(ids, bias=torch.zeros(B, H, 1)), query, AT, 1, 10, None, Exact())


def tail_of(rows: int = 3, ids: tuple[int, ...] = (0,), heads: int = H, bias: float = 0.0, **kind) -> Tail:
    keys, named = torch.zeros(B, H, rows, D, **kind), torch.tensor(ids).expand(B, heads, -1)
    return Tail(keys, keys, Selection.tokens(named, bias=torch.full(named.shape, bias)))


@pytest.mark.parametrize(
    ("tail", "sentence"),
    [
        (lambda: Selection.none(B, H), "returned Selection from tail, not a Tail or None"),
        (lambda: tail_of(dtype=torch.float16), r"keys of a tail as torch.float16 \[2, 2, 3, 8\] .* torch.float32"),
        (lambda: tail_of(heads=2 * H), r"a tail with a selection \[B,Hs,S\] = \[2, 4, 1\] .* Hs is 2 .* or 6"),
        (lambda: tail_of(ids=(3,)), "it names row 3, and the rows of its tail are 0 to 2"),
        (lambda: tail_of(ids=(1, 1)), "names row 1 of which another span holds some"),
        (lambda: tail_of(bias=torch.inf), "the bias of row 0 is NaN or infinite"),
    ],
)
def test_a_tail_fits_the_query(tail: Callable[[], Tail], sentence: str) -> None:
    query = torch.randn(B, H, G, D)
    check_tail(tail_of(heads=H * G), query, AT, Exact())
    check_tail(None, query, AT, Exact())
    with pytest.raises(ContractError, match=sentence):
        check_tail(tail(), query, AT, Exact())


def test_a_tail_that_does_not_fit_itself_is_refused() -> None:
    rows, chosen = torch.zeros(B, H, 3, D), Selection.none(B, H)
    with pytest.raises(ValueError, match=r"both \[B,H,M,D\], got \[2, 2, 3, 8\] and \[2, 2, 2, 8\]"):
        Tail(rows, rows[:, :, :2], chosen)
    with pytest.raises(ValueError, match=r"B = 2 and Hs = 2 .* a multiple of it .* got \[2, 3, 0\]"):
        Tail(rows, rows, Selection.none(B, 3))


class Greedy(Exact):
    """Ignores its budget."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return super().select(query, step, 10 * budget)


def test_bench_ends_with_one_sentence(tmp_path: Path) -> None:
    trace = tmp_path / "t.safetensors"
    synthetic(300, heads=1, group=2, size=8, layers=1).save(trace)
    line = f"bench {trace} --selector {__name__}:Greedy --budget 20 --last 2 --no-figures --out"
    done = run(line, tmp_path / "out")
    assert done.exit_code == 2
    assert ":Greedy:" in done.stderr
    assert "rows for a budget of 20" in done.stderr
    assert "Traceback" not in done.output


def test_eval_ends_with_one_sentence(tmp_path: Path) -> None:
    line = "eval --model reference --task passkey --lengths 300 --depths 0.5 --samples 1 --budget 20 --no-figures"
    done = run(f"{line} --selector {__name__}:Greedy --out", tmp_path)
    assert done.exit_code == 2
    assert "rows for a budget of 20" in done.stderr
    assert "Traceback" not in done.output


WRITES: dict[str, Callable[[Rows | None, Tensor | None, StepContext | None], object]] = {
    "rows.keys": lambda rows, query, step: rows and rows.keys.div_(2),
    "rows.values": lambda rows, query, step: rows and rows.values[..., 0].zero_(),
    "query": lambda rows, query, step: None if query is None else query.float().mul_(2),
    "step.valid": lambda rows, query, step: step and step.valid[:, ::2].zero_(),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_a_selector_is_shown_is_not_its_own(what: str) -> None:
    class Writes(Exact):
        def append(self, rows: Rows) -> None:
            WRITES[what](rows, None, None)
            super().append(rows)

        def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
            WRITES[what](None, query, step)
            return super().select(query, step, budget)

    cache = KVCache(Writes(), sink=0, window=0, check=True)
    cache.append(*torch.randn(2, B, H, 64, D))
    with pytest.raises(ContractError, match=f"changed {what} in place: what a selector is shown is not its own"):
        cache.select(torch.randn(B, H, G, D), 8)
    trace = synthetic(100, size=16)
    before = evaluate(trace, "exact", 8, last=4).mean("mass")
    with pytest.raises(ContractError, match=f"changed {what} in place"):
        evaluate(trace, Writes(), 8, last=4)
    assert evaluate(trace, "exact", 8, last=4).mean("mass") == before


@pytest.mark.parametrize("scan", [(1, 1), Scan(1, 1)], ids=["tuple", "scan"])
def test_what_choosing_reads_is_a_scan_of_0_or_more(scan: object) -> None:
    class Reads(Exact):
        def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
            return scan  # type: ignore[return-value]

    if isinstance(scan, Scan):
        assert evaluate(synthetic(100, size=16), Reads(), 8, last=2).mean("scanned_share") > 0
    else:
        with pytest.raises(ValueError, match="returned tuple from scan, which returns a Scan or None"):
            evaluate(synthetic(100, size=16), Reads(), 8, last=2)
    for entries, read in ((-1, 0), (0, -5), (math.nan, 0), (0, math.inf)):
        with pytest.raises(ValueError, match="a Scan is of 0 or more entries and bytes"):
            Scan(entries, read)


def test_a_file_for_another_group_is_refused_by_a_cache(tmp_path: Path) -> None:
    trace = synthetic(300, heads=1, group=1, size=16)
    trace.save(tmp_path / "trace.safetensors")
    file = tmp_path / "indexer.safetensors"
    train_index([tmp_path / "trace.safetensors"], file, IndexRecipe("indexer", 4, steps=2))
    cache = KVCache(make_selector(f"indexer:artefact={file}").for_layer(0), sink=0, window=0)
    cache.append(*torch.randn(2, 1, 1, 64, 16))
    for _ in range(2):
        with pytest.raises(ValueError, match="query heads a KV head"):
            cache.select(torch.randn(1, 1, 2, 16), 8)
