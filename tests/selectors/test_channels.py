"""SparQ, DoubleSparsity, Loki and PQCache beyond the laws: what their papers promise, calibrations, what they cost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparseattn import DoubleSparsity, Exact, KVCache, Loki, PQCache, Selector, SparQ, decode, evaluate, make_selector
from sparseattn.cli.app import app
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.roles.roles import Roles
from sparseattn.selectors.parameters.channel_calibration import METHODS, Calibration, CalibrationError
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.training import TrainingError, calibrate
from tests.cases import attention, heads

FULL = {
    "sparq": lambda group: SparQ(1 << 20, group=group),
    "loki": lambda group: Loki(1 << 20, group=group),
    "doublesparsity": lambda group: DoubleSparsity(1 << 20, 16, share=1.0, group=group),
}


def filled(selector: Selector, keys: torch.Tensor, values: torch.Tensor | None = None, queries=None) -> KVCache:
    cache = KVCache(selector, sink=0, window=0, seal=32)
    cache.append(keys, keys if values is None else values, queries)
    cache.seal()
    return cache


@pytest.mark.parametrize("group", ["each", "softmax", "max"])
@pytest.mark.parametrize("name", FULL)
def test_all_channels_choose_the_top_rows(name: str, group: str) -> None:
    queries, keys, _ = heads(2, 2, 3, 300, 32)
    query = queries[:, :, :, -1]
    found, exact = (filled(one, keys, queries=queries).select(query, 20) for one in (FULL[name](group), Exact(group)))
    assert torch.equal(found.rows.sort(-1).values, exact.rows.sort(-1).values)


def test_sparqs_logits_are_those_of_its_largest_channels_by_its_temperature() -> None:
    queries, keys, _ = heads(2, 2, 3, 50, 24)
    query, sparq = queries[:, :, :, -1], SparQ(5)
    cache = filled(sparq, keys)
    got = sparq.logits(query, cache.search.step().valid)
    for b in range(2):
        for h in range(2):
            q = query[b, h]
            largest = q.abs().sum(0).argsort(descending=True)[:5]
            for g in range(3):
                part = q[g, largest]
                temperature = (24 * part.abs().sum() / q[g].abs().sum()).sqrt()
                expected = keys[b, h][:, largest] @ part / temperature
                torch.testing.assert_close(got[b, h, g], expected)
    assert bool((sparq.logits(torch.zeros_like(query), cache.search.step().valid) == 0).all())


def test_sparqs_mean_value_weighs_what_the_rows_not_read_would() -> None:
    """With all channels the weight is exact: the output is attention in which rows not read have the mean value."""
    queries, keys, values = attention(2, 2, 1, 300, 32)
    query, sparq = queries[:, :, :, -1], SparQ(32)
    cache = filled(sparq, keys, values)
    read = cache.select(query, 20).mask(300)
    weights = (query[:, :, 0, None].double() @ keys.mT.double() / 32**0.5).softmax(-1)[:, :, 0]
    left = weights.masked_fill(read, 0.0).sum(-1, keepdim=True)
    expected = ((weights * read)[..., None] * values).sum(2) + left * values.double().mean(2)
    torch.testing.assert_close(decode(query, cache, 20)[:, :, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert float(left.mean()) > 0.01
    assert sparq.tail(query, cache.search.step(), cache.select(query, 300)).selection.attended.sum() == 0


def test_sparqs_mean_value_is_for_a_query_head_alone_unless_asked_for() -> None:
    for group, mean, added in ((1, None, True), (3, None, False), (3, True, True), (1, False, False)):
        queries, keys, values = heads(1, 2, group, 60, 16)
        cache = filled(SparQ(8, mean), keys, values)
        query = queries[:, :, :, -1]
        assert (cache.search.tail(query, cache.select(query, 20)) is not None) is added


def test_lokis_directions_are_orthonormal_and_those_of_largest_variance() -> None:
    draw = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(2, 16, 16, generator=draw)).Q
    spread = torch.linspace(4, 0.1, 16)
    keys = torch.randn(2, 4000, 16, generator=draw) * spread @ turn.mT + 3
    found = METHODS["loki"].of(keys)
    basis, variance = found["basis"], found["variance"]
    torch.testing.assert_close(basis.mT @ basis, torch.eye(16).expand(2, 16, 16))
    torch.testing.assert_close(variance, (keys @ basis).var(1, correction=0), rtol=1e-3, atol=1e-4)
    assert bool((variance.diff(dim=1) <= 0).all())
    assert float((basis[..., 0] * turn[..., 0]).sum(1).abs().min()) > 0.9  # the mean is no direction of its own


def test_lokis_directions_before_rope_are_of_keys_with_rope_taken_back() -> None:
    _, keys, _ = attention(1, 2, 1, 300, 32)
    rope, loki = Rope.of(32), Loki(8, before=True)
    loki.bind(replace(loki.layer_context, rope=rope))
    filled(loki, keys)
    plain = rope.unrotate(keys[0], torch.arange(300))
    torch.testing.assert_close(loki.basis.data[0], METHODS["loki"].of(plain)["basis"][..., :8], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="no fixed RoPE of layer 0 is known here"):
        filled(Loki(8, before=True), keys)


def test_double_sparsity_keeps_the_channels_whose_products_are_largest() -> None:
    queries, keys, _ = heads(1, 2, 3, 200, 16)
    keys[:, 0, :, 3] *= 9
    queries[:, 1, 2, :, 7] *= 9  # of one query head of the group
    select = DoubleSparsity(4, share=0.5)
    filled(select, keys, queries=queries)
    assert [int(one[0]) for one in select.which.data[0]] == [3, 7]
    sampled = torch.arange(1, 200, 2)  # the queries of every second row, with their own keys
    expected = (queries[0, :, :, sampled] * keys[0, :, None, sampled]).abs().mean((1, 2)).topk(4).indices
    assert torch.equal(select.which.data[0], expected)
    with pytest.warns(UserWarning, match="no queries of the prefill to learn from in 2 of 2 heads"):
        filled(DoubleSparsity(share=0.0), keys)


@pytest.mark.parametrize("bits", [2, 4])
def test_labels_of_few_bits_are_half_a_step_off_at_most(bits: int) -> None:
    queries, keys, _ = heads(2, 2, 3, 100, 16)
    four, full = (DoubleSparsity(7, each, share=1.0) for each in (bits, 16))
    query = queries[:, :, :, -1]
    for one in (four, full):
        valid = filled(one, keys, queries=queries).search.step().valid
    kept = query.gather(3, four.which.data[:, :, None].expand(-1, -1, 3, -1)).abs().sum(3) / 4  # sum |q_i| / sqrt(D)
    off = (four.logits(query, valid) - full.logits(query, valid)).abs()
    step = four.levels.data[..., 1].float()[:, :, None]  # [B,H,1,N]
    rounded = 16 * 2**-8 * step + 0.02 * four.levels.data[..., 0].float().abs()[:, :, None]  # levels are of 16 bits
    assert bool((off <= kept[..., None] * (0.5 * step + rounded)).all())
    assert four.labels.data.shape[3] == bits


def test_pqcache_names_each_half_of_a_key_by_one_of_64_centroids_of_all_keys() -> None:
    queries, keys, _ = attention(1, 2, 3, 9000, 32)
    cache = PQCache()
    filled(cache, keys)
    assert cache.centroids.data.shape == (1, 2, 2, 64, 16)
    assert cache.codes.data.shape == (1, 2, 9000, 2)
    assert int(cache.codes.data.max()) == 63
    counts = cache.codes.data[0, 0, :, 0].long().bincount(minlength=64)
    mean = torch.stack([keys[0, 0, cache.codes.data[0, 0, :, 0] == name, :16].mean(0) for name in range(64)])
    near = (cache.centroids.data[0, 0, 0].float() - mean).norm(dim=1) / mean.norm(dim=1)
    assert float((near * counts).sum() / counts.sum()) < 0.05, "a centroid is the mean of its keys, none left out"
    found = filled(make_selector("pqcache"), keys[:, :, :1000].bfloat16()).select(queries[:, :, :, -1].bfloat16(), 16)
    assert found.scan_bytes.tolist() == [[1000 * 2 + 64 * 32 * 2] * 2]


@pytest.mark.parametrize(
    ("spec", "row", "once"),
    [
        ("sparq:channels=8", 8 * 2, 0),
        ("loki", 16 * 2, 4 * 64 * 16),
        ("doublesparsity:share=1.0", 16 // 2 + 4, 0),
        ("doublesparsity:share=1.0,bits=16", 16 * 2, 0),
        ("doublesparsity:share=1.0,bits=2,channels=32", 32 // 4 + 4, 0),
    ],
)
def test_bytes_read_are_those_of_the_channels(spec: str, row: int, once: int) -> None:
    queries, keys, _ = attention(1, 2, 3, 320, 64)
    half = filled(make_selector(spec), keys.bfloat16(), queries=queries.bfloat16())
    found = half.select(queries[:, :, :, -1].bfloat16(), 16)
    assert found.scan_bytes.tolist() == [[320 * row + once] * 2]
    assert found.scanned.tolist() == [[320, 320]]


def test_more_channels_find_more() -> None:
    trace = synthetic(1024, heads=2, group=2, size=64)
    for few, many in (("sparq:channels=4", "sparq:channels=32"), ("loki:dimensions=4", "loki:dimensions=48")):
        found = [evaluate(trace, make_selector(spec), 64, last=8).mean("recovered") for spec in (few, many)]
        assert found[0] < found[1]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    paths = [folder / f"{seed}.safetensors" for seed in range(2)]
    for seed, path in enumerate(paths):
        synthetic(300, layers=2, heads=2, group=2, size=16, rope=True, seed=seed).save(path)
    return paths


@pytest.mark.parametrize("method", ["loki", "doublesparsity"])
def test_a_calibration_of_one_prompt_is_what_the_prompt_itself_gives(
    method: str, traces: list[Path], tmp_path: Path
) -> None:
    trace, file = Trace.open(traces[0]), tmp_path / "one.safetensors"
    made = calibrate(traces[:1], method, file)
    layer = trace.layer(1)
    expected = METHODS[method].of(layer.keys.float(), layer.query)
    for name, part in made.layers[1].items():
        torch.testing.assert_close(part, expected[name], rtol=1e-3, atol=1e-4)
    prompt = "share=1.0" if method == "doublesparsity" else "dimensions=4"
    own, filed = (make_selector(f"{method}:{rest}") for rest in (prompt, f"artefact={file},{prompt}"))
    assert own.queries_wanted[0] == (method == "doublesparsity")
    assert not filed.learns
    query = layer.query[None, :, :, -1]
    found = []
    for selector in (own, filed):
        selector = selector.for_layer(LayerContext(1, rope=layer.rope))
        found.append(filled(selector, layer.keys[None], queries=layer.query[None]).select(query, 30))
    assert torch.equal(found[0].rows, found[1].rows)


def test_a_calibration_serves_the_heads_that_a_role_gives_it(traces: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    calibrate(traces[:1], "loki", file)
    method = f"loki:artefact={file},dimensions=4"
    trace, settings = Trace.open(traces[0]), {"layers": [1], "last": 4}
    mixed = evaluate(trace, Roles({0: "dense", 1: ["window", method]}), 20, **settings)
    alone = evaluate(trace, method, 20, **settings)
    assert torch.equal(mixed.heads["recall@10"][:, 2:], alone.heads["recall@10"][:, 2:])


def test_a_calibration_is_known_by_its_content(traces: list[Path], tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "other", "moved")]
    for path, file in zip(traces, files, strict=False):
        calibrate([path], "loki", file)
    shutil.copy(files[0], files[2])
    one, other, moved = (Loki(artefact=str(file)).index_arguments() for file in files)
    assert one == moved
    assert one != other


def test_sums_over_prompts_are_of_all_tokens(traces: list[Path], tmp_path: Path) -> None:
    made = calibrate(traces, "loki", tmp_path / "both.safetensors", layers=[0])
    keys = torch.cat([Trace.open(path).layer(0).keys for path in traces], 1)
    assert list(made.layers) == [0]
    torch.testing.assert_close(made.layers[0]["variance"], METHODS["loki"].of(keys)["variance"], rtol=1e-4, atol=1e-5)
    assert len(made.meta["prompts"]) == 2


def test_the_command_writes_what_the_selector_reads(traces: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "before.safetensors"
    line = ["calibrate", *map(str, traces), "--method", "loki", "--before-rope", "--out", str(file), "--json"]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["method"] == "loki"
    assert all(0.25 < one <= 1 for one in report["layers"].values())
    assert not Calibration.load(file).roped
    make_selector(f"loki:artefact={file},before=True").for_layer(1)
    shown = CliRunner().invoke(app, ["info", str(file)])
    assert "de-roped" in shown.stdout
    with pytest.raises(ValueError, match="is of keys before RoPE, and loki takes them after it"):
        make_selector(f"loki:artefact={file}")
    with pytest.raises(
        ValueError, match="doublesparsity needs one for doublesparsity: sparseattn train --method doublesparsity"
    ):
        make_selector(f"doublesparsity:artefact={file}")
    with pytest.raises(CalibrationError, match=r"holds layers 0, 1, layer 5 is asked for"):
        Loki(artefact=str(file), before=True).for_layer(5)


def test_what_does_not_fit_is_refused_in_a_sentence(traces: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    calibrate(traces[:1], "loki", file)
    _, keys, _ = heads(1, 3, 1, 40, 16)
    with pytest.raises(CalibrationError, match="for 2 KV heads of size 16, layer 0 here has 3 of size 16"):
        filled(Loki(artefact=str(file)), keys)
    with pytest.raises(CalibrationError, match=r"was made with a RoPE of 14 dimensions .* here applies no RoPE"):
        filled(Loki(artefact=str(file)), keys[:, :2])
    with pytest.raises(CalibrationError, match=r"nowhere is no calibration file \(`sparseattn train --method METHOD`"):
        Loki(artefact="nowhere")
    with pytest.raises(CalibrationError, match="but not a calibration"):
        Loki(artefact=str(traces[0]))
    with pytest.raises(CalibrationError, match=r"basis of layer 0 is finite float32 \[2, 8, 8\]"):
        Calibration("loki", {0: {"basis": torch.full((2, 8, 8), torch.nan), "variance": torch.ones(2, 8)}})
    with pytest.raises(TrainingError, match="one of loki, doublesparsity, got 'quest'"):
        calibrate(traces, "quest", file)
    with pytest.raises(TrainingError, match="doublesparsity takes keys and queries after RoPE"):
        calibrate(traces, "doublesparsity", file, roped=False)
    with pytest.raises(ValueError, match="channels is 1 or more, got 0"):
        SparQ(0)
    with pytest.raises(ValueError, match="bits is 2 or 4, or 16 for numbers as keys are, got 8"):
        DoubleSparsity(bits=8)
