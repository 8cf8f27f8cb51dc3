"""Roles: the value and its file, and that heads of several methods do what each method does alone."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseattn import SAAP, Exact, KVCache, Quest, Window, evaluate
from sparseattn.core.context import Heads, LayerContext
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.evaluation.step_measures import MEASURES
from sparseattn.roles.papers import duo, echo_and_induction, pyramid, razor
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors.baselines.recent import Recent
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from tests.cases import drawn, heads
from tests.command import run

MIXED: list[Any] = ["dense", "quest:page=8", "random", "window", Role("window", 32), Role("exact:group=each", "10%")]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic(300, heads=len(MIXED), group=2, size=32, layers=2, clusters=8, rope=True)


# -- the value and the file --------------------------------------------------------------------------------------------


def test_a_file_gives_back_the_same_roles(tmp_path: Path) -> None:
    roles = Roles({0: "dense", 1: MIXED, 7: Role("quest", 256)}, "mine", {"from": ["anything"]})
    roles.save(tmp_path / "other.json")
    again = Roles.load(tmp_path / "other.json")
    assert (again.layers, again.name, again.meta) == (roles.layers, "mine", {"from": ["anything"]})
    assert (repr(again), again.source()) == (repr(roles), roles.source())
    assert repr(roles) == (
        "Roles(mine; 0: dense; 1: [dense, quest:page=8, random, window, window at 32, exact:group=each at 10%]; "
        "7: quest at 256)"
    )
    record = json.loads((tmp_path / "other.json").read_text())
    assert record["layers"]["1"][3:5] == ["window", {"method": "window", "budget": 32}]
    (tmp_path / "other.json").write_text(json.dumps({**record, "name": "other"}))
    assert Roles.load(tmp_path / "other.json").source() == roles.source(), "a name changes no result"
    assert Roles({0: [Role("exact", 1), Role("exact", 1.0)]}).shares(0, 2)[1].heads == Heads((1,), 2), "a row, and all"


LAYERS = {"0": "dense", "1": ["dense", "window"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "sparseattn-trace"}, 'a JSON object with "format": "sparseattn-roles"'),
        ({"version": 2}, "its version is 2, this release reads 1"),
        ({"budget": 64}, "anything else in meta; got 'budget'"),
        ({"layers": {}}, "one layer or more"),
        ({"layers": ["dense"]}, "layers and meta are objects"),
        ({"layers": {"00": "dense"}}, "numbers of layers, such as .*'00'"),
        ({"layers": {"2": []}}, "layer 2: a list has a role for each KV head"),
        ({"layers": {"2": ["dense", "qest"]}}, "layer 2, KV head 1: no selector is called 'qest'"),
        ({"layers": {"2": ["dense", 7]}}, "layer 2, KV head 1: a role is .*got 7"),
        ({"layers": {"2": {"role": "dense"}}}, "layer 2: a role is .*'role': 'dense'"),
        ({"layers": {"2": {"method": "dense", "budget": 64}}}, "layer 2: dense has no use for a budget, got 64"),
        ({"layers": {"2": {"method": "quest", "budget": 4}}}, "layer 2: .*4 rows is less than one span"),
        ({"layers": {"2": {"method": "quest", "budget": "some"}}}, "layer 2: a budget is rows"),
        ({"layers": {"2": {"method": "quest", "budget": None}}}, "layer 2: a role is"),
    ],
)
def test_a_file_is_refused_with_layer_and_head(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    record = {"format": "sparseattn-roles", "version": 1, "layers": LAYERS}
    path = tmp_path / "roles.json"
    path.write_text(json.dumps(record))
    Roles.load(path)
    path.write_text(json.dumps({**record, **change}))
    with pytest.raises(ValueError, match=words) as error:
        Roles.load(path)
    assert str(error.value).startswith(f"{path} is no file of roles")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"format": "sparseattn-roles", "version": 1, "layers": {"0": "dense", "0": "window"}}', "'0' comes twice"),
    ],
)
def test_what_is_no_file_of_roles_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "roles.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        Roles.load(tmp_path / "roles.json")


def test_pyramid_falls_linearly_around_its_mean() -> None:
    budgets = pyramid(32, 2000)
    assert sum(budgets) == 32 * 2000
    assert (budgets[0], budgets[-1]) == (2 * 2000 - 100, 100)
    assert max(abs(a - b - 3800 / 31) for a, b in pairwise(budgets)) <= 1
    paged = pyramid(28, 1024, 4, unit=16)
    assert sum(paged) == 28 * 1024
    assert {rows % 16 for rows in paged} == {0}
    assert (paged[0], paged[-1]) == (1792, 256)
    shares = pyramid(5, 0.1, 5)
    assert shares == pytest.approx([0.18, 0.14, 0.1, 0.06, 0.02])
    assert (pyramid(1, 64), pyramid(3, 64, 1)) == ([64], [64] * 3)
    for wrong, words in (
        ((0, 64), "1 or more"),
        ((4, 64, 0.5), "1 or more"),
        ((4, 0.6), "begin at 1.17 of the context"),
        ((4, 8), "end at 0.4 rows, less than the 1"),
    ):
        with pytest.raises(ValueError, match=words):
            pyramid(*wrong)
    with pytest.raises(ValueError, match="multiples of 16"):
        pyramid(4, 100, unit=16)


def test_echo_and_induction_scores_are_weights_on_earlier_places() -> None:
    """Huawei's razor_attention (mindspore-ai/golden-stick), `_get_score_mask`: the token's earlier places, and one on;
    the mean weight of later repetitions there, of a KV head the largest of its query heads."""
    heads, group, period, times, size = 2, 3, 30, 3, 16
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(heads, group, period * times, size, generator=draw)
    keys = torch.randn(heads, period * times, size, generator=draw)
    echo, induction = echo_and_induction(queries, keys, period)
    count = period * times
    weights = (
        (queries.double() @ keys[:, None].double().mT / size**0.5)
        .masked_fill(~torch.ones(count, count, dtype=torch.bool).tril(), -torch.inf)
        .softmax(-1)
    )
    for found, shift in ((echo, 0), (induction, 1)):
        total = torch.zeros(heads, group, dtype=torch.float64)
        for i in range(period, count):
            for j in range(i % period, i, period):
                total += weights[:, :, i, j + shift]
        torch.testing.assert_close(found.double(), (total / (count - period)).amax(1), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="repeats after 1 to 89 of them, got a period of 90"):
        echo_and_induction(queries, keys, 90)


def test_razor_reads_retrieval_heads_whole() -> None:
    echo, induction = torch.tensor([[0.9, 0.0], [0.1, 0.2]]), torch.tensor([[0.0, 0.1], [0.7, 0.2]])
    roles = razor(echo, induction, echoes=0.25, inductions=0.25, local=Role("razor", 0.2))
    assert roles.layers == Roles([["dense", Role("razor", 0.2)], ["dense", Role("razor", 0.2)]]).layers
    with pytest.raises(ValueError, match="a share of the heads is 0 to 1, got 2"):
        razor(echo, induction, echoes=2)
    with pytest.raises(ValueError, match=r"scores are \[L,H\] both"):
        razor(echo, induction[0])


def test_duo_reads_heads_of_large_scores_whole() -> None:
    roles = duo([[0.9, 0.5], [0.1, 0.51]], 0.5, streaming=Role("window", 192))
    streams = Role("window", 192)
    assert roles.layers == {0: (Role("dense"), streams), 1: (streams, Role("dense"))}
    assert roles.layers == duo(torch.tensor([[0.9, 0.5], [0.1, 0.51]]), 0.5, streaming=streams).layers
    with pytest.raises(ValueError, match=r"lists of numbers, .* for layer 1"):
        duo({0: [1.0], 1: [float("nan")]}, 0.5)


# -- heads of several methods ------------------------------------------------------------------------------------------


def test_mixed_heads_measure_as_each_method_alone(trace: Trace) -> None:
    settings: dict[str, Any] = {"sink": 2, "window": 8, "last": 5}
    order = [3, 0, 5, 1, 4, 2]  # heads of a role lie apart in one layer and in another order in the other
    roles = Roles({0: MIXED, 1: [MIXED[i] for i in order[:3]] + [MIXED[i] for i in order[:3]]})
    steps: list[int] = []
    found = evaluate_budgets(trace, roles, [16, 64], Replay(**settings), progress=steps.append)
    assert sum(steps) == 2 * 2 * 5
    alone = {
        "dense": (Recent(), None),
        "quest:page=8": (Quest(8), ...),
        "random": ("random", ...),
        "window": (Window(), ...),
        "window at 32": (Recent(), 32),
        "exact:group=each at 10%": (Exact("each"), 0.1),
    }
    for one, asked in zip(found, (16, 64), strict=True):
        assert (one.label, one.budget) == ("roles roles", asked)
        for i in range(2):
            given = roles.layers[i]
            assert isinstance(given, tuple)
            for head, role in enumerate(given):
                selector, own = alone[str(role)]
                expected = evaluate(trace, selector, asked if own is ... else own, layers=[i], **settings)  # type: ignore[arg-type]
                for name in MEASURES:
                    mine = one.heads[name].view(2, len(MIXED), 2)[i, head]
                    theirs = expected.heads[name].view(len(MIXED), 2)[head]
                    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9, equal_nan=True)
    dense = found[0].heads["relative_error"].view(2, len(MIXED), 2)[0, 0]
    assert float(dense.max()) < 1e-5


def test_trained_parameters_follow_their_heads() -> None:
    queries, keys, values = heads(1, 3, 2, 200, 16)
    found = []
    for which in (None, Heads((0, 2), 3)):
        selector = drawn(SAAP, probes=3)
        selector.bind(LayerContext(heads=which))
        own = slice(None) if which is None else list(which.which)
        cache = KVCache(selector, sink=0, window=4, seal=16)
        cache.append(keys[:, own], values[:, own], queries[:, own])
        chosen = cache.select(queries[:, own, :, -1], 64)
        rows = cache.stored.sealed_keys.gather(2, chosen.rows.clamp(min=0)[..., None].expand(-1, -1, -1, 16))
        found.append((rows * (chosen.rows >= 0)[..., None]).sum(2))
    torch.testing.assert_close(found[0][:, [0, 2]], found[1])


def test_roles_that_do_not_fit_a_trace_are_refused(trace: Trace) -> None:
    for layers, words in (
        ({0: MIXED}, "say nothing of layer 1: they are of layers 0;"),
        ({0: MIXED, 1: MIXED[:2]}, "name 2 KV heads in layer 1, and it has 6"),
        ({0: "quest:page=256", 1: "dense"}, "needs at least 256"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(trace, Roles(layers), 64, last=5)
    with pytest.raises(ValueError, match="less than one span"):
        evaluate(trace, Roles(["quest", "dense"]), 8, last=5)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_bench_compares_roles_as_one_method(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "t.safetensors")
    roles = Roles({0: MIXED, 1: "quest"}, "mixed")
    roles.save(tmp_path / "r.json")
    small = f"bench {tmp_path}/t.safetensors --budget 16,64 --sink 2 --window 8 --last 4 --no-figures --out"
    done = run(f"{small} {tmp_path}/o --selector quest --roles {tmp_path}/r.json")
    assert done.exit_code == 0, done.output
    assert "roles mixed " in done.output
    records = [json.loads(line) for line in (tmp_path / "o" / "bench.jsonl").read_text().splitlines()]
    assert [(one["label"], one["budget"]) for one in records] == [
        *(("quest", budget) for budget in (16, 64)),
        *(("roles mixed", budget) for budget in (16, 64)),
    ]
    assert records[2]["selector"] == repr(roles)
    expected = evaluate(trace, roles, 64, sink=2, window=8, last=4).mean("relative_error")
    assert records[3]["mean"]["relative_error"] == pytest.approx(expected)
    Roles({0: MIXED}, "mixed").save(tmp_path / "s.json")
    unfit = run(f"{small} {tmp_path}/no --roles {tmp_path}/s.json")
    assert (unfit.exit_code, (tmp_path / "no").exists()) == (2, False)
    assert "roles mixed say nothing of layer 1" in " ".join(unfit.output.split())
    twice = run(f"{small} {tmp_path}/o --roles {tmp_path}/s.json --roles {tmp_path}/r.json")
    assert (twice.exit_code, "two files of --roles have the name mixed" in " ".join(twice.output.split())) == (2, True)


# -- in a model --------------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")

from sparseattn.models.prefill import Prefill  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from tests.models.tiny import MODES, NEW, SMALL, generate, padded, plain, prompt, same, small  # noqa: E402

WHOLE = Roles(
    [
        ["quest:page=4", "dense", Role("window", "all"), "quest:page=4"],
        ["dense"] * 4,
        [Role("exact:group=each", "all"), "exact:group=each", "dense", "dense"],
    ]
)
FEW = Roles([["window", "quest:page=4", "dense", "window"], "quest:page=4", [Role("exact", 8)] * 3 + ["random"]], "few")


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama", num_attention_heads=8, num_key_value_heads=4)


@pytest.mark.parametrize("mode", MODES)
def test_mixed_heads_that_read_all_are_dense(llama: Any, mode: str) -> None:
    for inputs in [{"input_ids": prompt()}, *([] if mode == "lookup" else [padded()])]:
        expected = generate(llama, plain(llama), inputs, **MODES[mode])
        with SparseCache(llama, roles=WHOLE, budget=None, **SMALL, rollback=4) as cache:
            assert (cache.dense_layers, list(cache.sparse_layers)) == ((1,), [0, 2])
            same(generate(llama, cache, inputs, **MODES[mode]), expected)
            assert min(int(part.rows.sealed.min()) for part in cache.sparse_layers[0].parts) >= 16
            stats = cache.stats()
            assert stats.rows == pytest.approx(stats.context)


def heads_of_layer(model: Any, cache: Any, inputs: dict[str, Any], layer: int) -> torch.Tensor:
    """What the attention of a layer put out for the last token, `[HG,D]`."""
    seen: list[torch.Tensor] = []
    attention = model.model.layers[layer].self_attn
    hook = attention.o_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    generate(model, cache, inputs, max_new_tokens=2)
    hook.remove()
    return seen[-1][0, -1].unflatten(-1, (8, -1))


def test_each_head_attends_as_its_own_method_does(llama: Any) -> None:
    """In layer 0, whose inputs are the same whatever the methods are."""
    inputs = {"input_ids": prompt()}
    with SparseCache(llama, roles=FEW, budget=16, **SMALL) as cache:
        mixed = heads_of_layer(llama, cache, inputs, 0)
    alone = {
        name: heads_of_layer(llama, cache, inputs, 0)
        for name, cache in (
            ("window", SparseCache(llama, "window", **SMALL)),
            ("quest:page=4", SparseCache(llama, "quest:page=4", 16, **SMALL)),
            ("dense", SparseCache(llama, "exact", None, **SMALL)),
        )
    }
    given = FEW.layers[0]
    assert isinstance(given, tuple)
    for head, role in enumerate(given):
        rows = slice(2 * head, 2 * head + 2)
        torch.testing.assert_close(mixed[rows], alone[role.method][rows], rtol=0, atol=1e-5)
    assert not torch.allclose(alone["window"], alone["dense"], atol=1e-3)


def test_counts_are_means_over_heads(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    with SparseCache(llama, roles=FEW, budget=16, **SMALL, check=True) as cache:
        generate(llama, cache, inputs)
        stats = cache.stats()
        parts = {part.share.label: part for part in cache.sparse_layers[0].parts}
        alone = SparseCache(llama, "quest:page=4", 16, **SMALL, check=True)
        generate(llama, alone, inputs)
        quest = alone.stats().layers[0]
    assert [layer.selector for layer in stats.layers] == [
        "window (2 of 4 heads), quest:page=4 (1 of 4 heads), dense (1 of 4 heads)",
        "quest:page=4",
        "exact at 8 (3 of 4 heads), random (1 of 4 heads)",
    ]
    assert [layer.sparse_calls for layer in stats.layers] == [NEW - 1] * 3
    assert (parts["dense"].mean_rows, parts["dense"].bytes_share) == (stats.layers[0].context, 1.0)
    assert parts["quest:page=4"].mean_rows == quest.rows
    narrow = parts["window"]
    assert stats.layers[0].rows == pytest.approx((2 * narrow.mean_rows + quest.rows + stats.context) / 4)
    shares = (2 * narrow.bytes_share + parts["quest:page=4"].bytes_share + 1) / 4
    assert stats.layers[0].bytes_share == pytest.approx(shares)


def test_mixed_heads_follow_edits(llama: Any) -> None:
    """A prefill that is shared, clones, another budget, a reset: each as if made anew."""
    inputs = padded((60, 41))
    held = Prefill(llama, inputs["input_ids"][:, :-1], inputs["attention_mask"][:, :-1], chunk=16)
    options: dict[str, Any] = {**SMALL, "sparse_from": 59}
    expected = generate(llama, SparseCache(llama, roles=FEW, budget=16, **options), inputs, max_new_tokens=6)
    more = generate(llama, SparseCache(llama, roles=FEW, budget=32, **options), inputs, max_new_tokens=6)
    cache = held.cache(roles=FEW, budget=16, **options)
    assert not torch.allclose(expected[1], more[1], atol=1e-4)
    for branch, right in ((cache.clone(), expected), (copy.deepcopy(cache), expected), (cache.clone(32), more)):
        same(generate(llama, branch, inputs, max_new_tokens=6), right)
    cache.reset()
    same(generate(llama, cache, inputs, max_new_tokens=6), expected)
    cache.reset()
    again = held.cache(roles=FEW, budget=16, **options)
    again.batch_select_indices(torch.tensor([1, 0, 1]))
    rows = [part.rows.lengths.tolist() for part in again.sparse_layers[0].parts]
    assert rows == [[40, 59, 40]] * 3
    with pytest.raises(ValueError, match="less than one span"):
        cache.clone(2)


def test_roles_that_do_not_fit_a_model_are_refused(llama: Any, tmp_path: Path) -> None:
    for layers, words in (
        (["dense", "quest"], "roles roles say nothing of layer 2: they are of layers 0-1;"),
        (["dense", "quest", "quest", "dense"], "layers 0-3, and LlamaForCausalLM has 3, 0 to 2: layer 3 is none"),
        (["quest", "quest", ["dense", "window"]], "name 2 KV heads in layer 2, and it has 4"),
    ):
        Roles(layers).save(tmp_path / "roles.json")
        with pytest.raises(ValueError, match=words):
            SparseCache(llama, roles=tmp_path / "roles.json")
    with pytest.raises(ValueError, match=r"roles name the selector of every layer: .*got 'exact' too"):
        SparseCache(llama, "exact", roles=FEW)
    gemma = small("gemma3")
    sliding = [i for i, kind in enumerate(gemma.config.layer_types) if kind == "sliding_attention"]
    with pytest.raises(ValueError, match=f"in layer {sliding[0]}, which does not attend to the whole context"):
        SparseCache(gemma, roles=Roles(["quest"] * len(gemma.config.layer_types)))
    whole = [i for i in range(len(gemma.config.layer_types)) if i not in sliding]
    assert list(SparseCache(gemma, roles=Roles(dict.fromkeys(whole, "quest"))).sparse_layers) == whole


def test_eval_asks_with_roles(tmp_path: Path) -> None:
    from sparseattn.models.load import reference_model

    model = reference_model()
    depth, kv = model.config.num_hidden_layers, model.config.num_key_value_heads
    roles = Roles({**dict.fromkeys(range(depth - 1), "dense"), depth - 1: ["window"] * (kv - 1) + ["quest"]}, "late")
    roles.save(tmp_path / "late.json")
    short = ["--model", "reference", "--lengths", "560", "--depths", "0.5", "--samples", "1", "--task", "kv"]
    short += ["--budget", "64,128", "--no-figures", "--out", tmp_path / "out"]
    done = run("eval", *short, "--roles", tmp_path / "late.json")
    assert done.exit_code == 0, done.output
    assert "roles late" in done.output
    records = [json.loads(line) for line in (tmp_path / "out" / "eval.jsonl").read_text().splitlines()]
    assert [(one["method"], one["budget"]) for one in records] == [
        ("full", None),
        ("roles late", "64"),
        ("roles late", "128"),
    ]
    assert records[1]["source"] == roles.source()
    assert 0 < records[1]["rows"] < records[2]["rows"] < records[1]["context"]
    Roles({0: "dense"}, "short").save(tmp_path / "short.json")
    unfit = run("eval", *short[:-1], tmp_path / "no", "--roles", tmp_path / "short.json")
    assert unfit.exit_code == 2
    assert "roles short say nothing of layer 1" in " ".join(unfit.output.split())
