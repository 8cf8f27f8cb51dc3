"""The benchmark of generation: every way does the same work, and the figures are what the clocks say."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import decoding, generate
from benchmarks.decoding import Way
from benchmarks.measure import Clock
from benchmarks.models import prompt, random_model, with_attention
from sparseattn.cache.kv_cache import KVCache
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import SparseCache, restore

SMALL = (
    *("--random", "tiny", "--dtype", "float32", "--device", "cpu", "--threads", "1", "--tokens", "200,300"),
    *("--steps", "4", "--block", "2", "--seal", "64", "--window", "16", "--budget", "32", "--chunk", "128"),
)


@pytest.fixture
def model() -> Any:
    return random_model("tiny", None, torch.float32, "cpu")


def settled(*more: str) -> Any:
    options = generate.parser().parse_args([*SMALL, *more])
    generate.settle(options)
    return options


def test_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    generate.main([*SMALL, "--selector", "quest", "--selector", "window", "--results", str(tmp_path), "--json"])
    record = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "generate-random-tiny-float32-cpu.json").read_text()) == record
    assert record["versions"]["torch"]
    assert record["machine"]["cores"]
    assert (record["dtype"], record["budget"], record["shape"]["num_hidden_layers"]) == ("float32", 32, 2)
    assert record["memory_mib"] > 50
    assert [one["tokens"] for one in record["lengths"]] == [200, 300]
    for one in record["lengths"]:
        ways = {way["name"]: way for way in one["ways"]}
        assert list(ways) == ["sdpa", "eager", "static", "quest", "window"]
        assert ways[one["dense"]]["speed_up"] == 1
        dense = [ways[name]["seconds_per_step"]["wall"] for name in decoding.DENSE]
        assert ways[one["dense"]]["seconds_per_step"]["wall"] == min(dense)
        assert {name: ways[name]["same_token_as_dense"] for name in decoding.DENSE} == dict.fromkeys(decoding.DENSE, 1)
        # Sink, window and the tokens fed, 1 to 8, none of which is sealed yet; quest seals whole pages of 16.
        assert ways["window"]["rows"] == 4 + 16 + 4.5
        assert ways["window"]["rows"] + 32 <= ways["quest"]["rows"] < ways["window"]["rows"] + 32 + 16
        for name in ("quest", "window"):
            inside = ways[name]["parts_seconds"]
            assert set(inside) == {"store", "select", "attend", "other", "model"}
            at_once = {"select"} if name == "quest" else set()  # chosen and attended to in one call
            assert {part for part, seconds in inside.items() if seconds <= 0} == at_once
            assert ways[name]["sealing_seconds_per_token"]["wall"] > 0
    titles = [table.title for table in generate.tables(record)]
    assert titles[0] is not None
    assert titles[0].startswith("200 tokens, budget 32; dense is transformers' ")
    assert len(titles) == 4


def test_every_way_computes_the_same(model: Any) -> None:
    """At an unlimited budget the sparse ways are full attention too, behind several steps and a seal."""
    options = settled("--budget", "all", "--selector", "exact", "--selector", "quest")
    ids = prompt(None, 256, 200 + generate.beyond(200, 2**17, options))
    models = {name: with_attention(model, name) for name in ("sdpa", "eager")}
    try:
        prefill = Prefill(model, ids[:, :200], chunk=128, queries=False)
        ways = decoding.dense_ways(prefill, models, ids.shape[1])
        ways += [decoding.sparse_way(prefill, model, spec, options, ids.shape[1]) for spec in options.selector]
        for t in range(200, 206):
            logits = torch.stack([way.feed(ids[:, t : t + 1]) for way in ways])
            torch.testing.assert_close(logits, logits[:1].expand_as(logits), atol=1e-4, rtol=1e-4)
        before = int(ways[-1].cache.layers[0].rows.sealed)
        assert decoding.sealing(ways[-1], ids[:, 206:286]).wall > 0
        assert int(ways[-1].cache.layers[0].rows.sealed) >= before + 64
        for way in ways[:-1]:
            way.feed(ids[:, 206:286])
        logits = torch.stack([way.feed(ids[:, 286:287]) for way in ways])
        torch.testing.assert_close(logits, logits[:1].expand_as(logits), atol=1e-4, rtol=1e-4)
    finally:
        restore(model)


def test_every_dense_way_serves_a_model_with_sliding_windows() -> None:
    """Whose layers hold fewer rows than the context, and a static cache's the window in place."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 24, "max_position_embeddings": 4096}
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, layer_types=kinds)).eval()
    models = {name: with_attention(model, name) for name in ("sdpa", "eager")}
    for tokens in (100, 10):  # longer and shorter than the window
        ids = prompt(None, 256, tokens + 40)
        with torch.no_grad():
            expected = models["sdpa"](ids).logits[0]
        try:
            ways = decoding.dense_ways(Prefill(model, ids[:, :tokens], chunk=64), models, tokens + 40)
        finally:
            restore(model)
        assert [way.name for way in ways] == list(decoding.DENSE)
        for t in range(tokens, tokens + 40):
            logits = torch.stack([way.feed(ids[:, t : t + 1]) for way in ways])
            torch.testing.assert_close(logits, expected[t].expand_as(logits), atol=1e-4, rtol=1e-4)


def test_what_is_fed_stays_within_the_positions() -> None:
    options = settled()
    steps, seal = decoding.WARM + options.steps + decoding.LOOKED_INTO, options.seal + options.window
    assert generate.beyond(200, 4096, options) == steps + seal
    assert generate.beyond(200, 200 + steps + seal - 1, options) == steps + seal - 1
    assert generate.beyond(200, 200 + steps + 1, options) == steps + 1
    assert generate.beyond(200, 200 + steps, options) == steps + seal  # the prompt asks for more than there are


def test_what_a_record_is_called() -> None:
    called = {"smollm2": "smollm2", "models/Some Model v1.5.gguf": "Some-Model-v1.5", "owner/name-2": "name-2"}
    for model, name in called.items():
        assert generate.name_of(Namespace(random=None, model=model)) == name
    assert generate.name_of(settled()) == "random-tiny"


def test_a_twin_shares_the_weights_and_nothing_else(model: Any) -> None:
    twin = with_attention(model, "eager")
    assert twin is not model
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine is its
    assert (model.config._attn_implementation, twin.config._attn_implementation) == ("sdpa", "eager")
    with SparseCache(model, "window"):
        twin(torch.tensor([[1, 2, 3]]))  # is not prepared, so runs without a SparseCache


class Fed(Way):
    """Writes down who was fed what."""

    log: list[tuple[str, int]]

    def step(self, ids: torch.Tensor) -> tuple[Clock, int]:
        self.log.append((self.name, int(ids)))
        return Clock(1.0, 1.0), int(ids)


def test_ways_take_turns_and_see_the_same_tokens() -> None:
    log: list[tuple[str, int]] = []
    ways = [Fed(name, None, None) for name in "ab"]
    for way in ways:
        way.log = log
    decoding.take_turns(ways, torch.tensor([[5, 6, 7, 8]]), 2, lambda: None)
    assert log == [("a", 5), ("a", 6), ("b", 5), ("b", 6), ("b", 7), ("b", 8), ("a", 7), ("a", 8)]
    assert all(way.tokens == [5, 6, 7, 8] and [len(steps) for steps in way.rounds] == [2, 2] for way in ways)


def test_figures() -> None:
    def way(name: str, *seconds: float) -> Way:
        rounds = [[Clock(one, 2 * one)] * 2 for one in seconds]
        return Way(name, None, None, Clock(9.0, 9.0), rounds, [1, 2, 3, len(name)])

    dense, fast = way("dense", 4.0, 6.0, 8.0), way("fast", 1.0, 1.0, 3.0)
    bare = way("bare", 1.0, 0.0, 2.0)
    one = decoding.figures(fast, dense, bare, Clock(1.0, 0.0), None, 7.5)
    assert (
        one["attention_removed"] == 0.667
    )  # of 2/3, 4/6, 4/6: dense less the step and its sealing, over dense less bare
    assert one["seconds_per_step"] == {"wall": 1.0, "processor": 2.0}
    assert one["tokens_per_second"] == 0.5  # a second for the step, one for its share of sealing
    assert (one["speed_up"], one["speed_up_range"]) == (2.0, [2.0, 3.0])  # of 2, 3, 2
    assert one["speed_up_processor"] == 4.0  # of 4, 6, 2.67
    assert one["same_token_as_dense"] == 0.75
    assert (one["rows"], one["index_seconds"]["wall"]) == (7.5, 9.0)
    assert decoding.figures(dense, dense, bare, None, None, None)["speed_up"] == 1
    assert decoding.figures(dense, dense, dense, None, None, None)["attention_removed"] is None


def test_the_stopwatch_lets_go() -> None:
    held = KVCache.append
    rows = KVCache(generate.make_selector("window"))
    with decoding.stopwatch(torch.device("cpu")) as spent:
        rows.append(*torch.randn(2, 1, 1, 5, 8))
    with pytest.raises(ValueError, match="of one shape"), decoding.stopwatch(torch.device("cpu")):
        rows.append(torch.zeros(1), torch.zeros(2))
    assert KVCache.append is held
    assert spent["store"] > 0
    assert spent["attend"] == 0


def test_what_is_measured_by_default() -> None:
    everything = [spec for spec in generate.SELECTED if spec.partition(":")[0] in generate.SELECTORS]
    options = generate.parser().parse_args(["--device", "cpu"])
    assert generate.default_selectors(options) == everything
    options = generate.parser().parse_args(["--device", "cuda", "--random", "8b"])
    assert generate.default_selectors(options) == ["exact", "quest", "window"]
    options = generate.parser().parse_args(["--device", "cuda", "--random", "8b", "--sealed-device", "cpu"])
    assert generate.default_selectors(options) == ["exact", "quest", "retrieval:share=0.25", "window"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--tokens 16k", "--tokens takes integers separated by commas, got '16k'"),
        ("--tokens 0,100", "--tokens is 1 or more, got 0"),
        ("--steps 0", "--steps is 1 or more, got 0"),
        ("--steps 5", "--steps is a multiple of --block 2, got 5"),
        ("--budget none", 'a budget is rows ("64"), a mass ("mass:0.95"), a share ("1%") or "all", got \'none\''),
        ("--budget 8 --selector quest", "less than one span"),
        ("--selector qwest", "did you mean 'quest'?"),
        ("--selector saap", "layer 0: "),  # the shipped buckets are another model's
        ("--model there", "--model there and --random tiny exclude each other"),
        ("--layers 0", "--layers is 1 or more, of a --random model, got 0"),
        ("--dense-layers 2", "--dense-layers 2 leaves no layer of the model to be sparse"),
        ("--tokens 100000000000 --selector window", "5 copies of the keys and values of 100000000000 tokens take"),
        ("--device nowhere", "device nowhere is not a torch device, such as cpu or cuda"),
    ],
)
def test_what_it_refuses(arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        generate.main([*SMALL, *arguments.split(), "--results", str(tmp_path / "none")])
    assert error.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()
