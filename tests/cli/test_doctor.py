"""`sparseattn doctor` says what a run then does: its rows and lengths are held against caches that decode."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from sparseattn.cli.doctor_options import DoctorOptions, Runner
from sparseattn.cli.serve_options import ServeOptions
from sparseattn.cost_model.known_models import named
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.diagnosis import diagnosed
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.roles.roles import Roles
from sparseattn.serving.vllm import defaults
from sparseattn.serving.vllm.diagnosis import diagnosed_for_vllm
from sparseattn.serving.vllm.settings import parse
from tests.command import run
from tests.models.tiny import small

LENGTH = 120


def decoded(model: Any, length: int, given: dict[str, Any]) -> list[tuple[int, int]]:
    """Rows read and held by each layer, in the step whose sequence has so many rows."""
    with SparseCache(model, sink=2, window=8, seal=None, **given) as cache, torch.no_grad():
        for ids in torch.arange(length)[None].split([length - 1, 1], 1):
            model(input_ids=ids, use_cache=True, **cache_argument(cache))
        found = cache.activity().layers.values()
        return [(ran.rows_read, ran.rows_held) if ran.sparse_steps else (length, length) for ran in found]


@pytest.mark.parametrize(
    "given",
    [
        {"selector": "quest:page=4", "budget": 16},
        {"selector": "quest:page=4", "budget": 18},
        {"selector": "exact", "budget": 24, "dense_layers": 1},
        {"selector": "exact", "budget": 0.25},
        {"selector": "window", "budget": None},
        {"selector": {0: "exact", "default": "quest:page=8"}, "budget": {0: 5, "default": 32}},
    ],
)
def test_rows_are_those_that_a_step_reads_and_sparse_from_is_where_it_first_leaves_some(given: dict[str, Any]) -> None:
    model = small("llama")
    with SparseCache(model, sink=2, window=8, seal=None, **given) as cache:
        lines = diagnosed(cache, LENGTH)
    assert [(line.rows_read, line.rows_held) for line in lines] == decoded(model, LENGTH, given)
    for line in lines:
        if line.method is None:
            assert line.why_dense == "--dense-layers leaves it dense"
            continue
        assert line.sparse_from is not None
        first = decoded(model, line.sparse_from, given)[line.layer]
        before = decoded(model, line.sparse_from - 1, given)[line.layer]
        assert first[0] < first[1] == line.sparse_from
        assert before[0] == before[1]


def test_a_sliding_window_says_so_and_all_rows_are_never_sparse() -> None:
    model = small("gemma3")
    with SparseCache(model, "exact", None, sink=2, window=8) as cache:
        lines = diagnosed(cache, LENGTH)
    assert [line.why_dense for line in lines] == [
        "it attends to a sliding window of 16 rows",
        "its budget is every row",
        "it attends to a sliding window of 16 rows",
    ]
    assert [line.rows_read for line in lines] == [16, LENGTH, 16]
    assert not any(line.active for line in lines)


def test_for_vllm_lengths_are_above_and_first_layers_are_those_of_the_whole_context() -> None:
    zones = {"sink": 4, "window": 20}
    settings = parse({"selector": "quest:page=16", "budget": 32, **zones, "dense_layers": 1, "above": 90})
    whole = SparseCache(small("llama"), "window", None, sink=0, window=1)
    lines = diagnosed_for_vllm(whole, settings, 200)
    # The sink's entry, two pages of the ten behind it, and what is left before the last 20 rows.
    assert [line.rows_read for line in lines] == [200, 72, 72]
    assert lines[0].why_dense == "--dense-layers leaves it dense"
    assert lines[1].sparse_from == 91
    assert not diagnosed_for_vllm(whole, settings, 90)[1].active
    below = parse({"selector": "quest:page=16", "budget": 32, **zones, "dense_layers": 0, "above": 0})
    first = diagnosed_for_vllm(whole, below, 200)[0].sparse_from
    assert first is not None
    assert not diagnosed_for_vllm(whole, below, first - 1)[0].active
    assert diagnosed_for_vllm(whole, below, first)[0].active


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    small("llama").save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--budget 600",
            "--budget 600 has no effect: the sequence has 512 rows, .* below 444 leaves some out",
        ),
        ("--dense-layers 3", "--dense-layers 3 leaves no layer of the whole context sparse: at most 2 may stay dense"),
        ("--for vllm --budget 64", "--above 8000 keeps every sequence dense: the sequence has 512 rows"),
        ("--length 60 --budget 16", "--sink 4 and --window 64 read all 60 rows"),
    ],
)
def test_settings_without_effect_are_named_and_end_in_status_1(folder: Path, words: str, says: str) -> None:
    done = run(f"doctor {words}", folder)
    assert done.exit_code == 1, done.output
    assert re.search(says, " ".join(done.output.split()))
    assert "no layer would skip a token at" in done.output


def test_lines_as_json(folder: Path) -> None:
    done = run("doctor --budget 64 --dense-layers 1 --length 300 --json", folder)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["method"] for line in lines] == [None, "quest", "quest"]
    assert [line["rows_read"] for line in lines] == [300, 140, 140]


def test_dense_layers_hold_beside_roles(folder: Path, tmp_path: Path) -> None:
    Roles(dict.fromkeys(range(3), "quest")).save(tmp_path / "roles.json")
    done = run(f"doctor --roles {tmp_path}/roles.json --budget 64 --dense-layers 2 --length 300 --json", folder)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["rows_read"] for line in lines] == [300, 300, 140], done.output


def test_for_vllm_the_defaults_are_those_that_serve_starts_with(folder: Path) -> None:
    served = {one.name: one.default for one in fields(ServeOptions)}
    settings = DoctorOptions(None, "any", engine=Runner.vllm).settings
    assert {name: getattr(settings, name) for name in ("selector", "budget", "sink", "window", "dense_layers")} == {
        name: served[name] for name in ("selector", "budget", "sink", "window", "dense_layers")
    }
    assert settings.above == defaults.ABOVE  # that of an engine which cannot measure it
    lines = [json.loads(line) for line in run("doctor --for vllm --length 9000 --json", folder).stdout.splitlines()]
    assert [line["budget"] for line in lines] == [None, None, "2048"]


@pytest.mark.parametrize(("name", "sparse"), [("llama-3.1-8b", 32), ("gemma3-4b", 5)])
def test_a_model_known_by_name_is_not_looked_for_on_the_hub(
    name: str, sparse: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparseattn.cli.doctor.open_model", lambda *_: pytest.fail("it was opened"))
    done = run(f"doctor {name} --json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    config = named()[name]["config"]
    assert len(lines) == config["num_hidden_layers"]
    assert sum(line["method"] is not None for line in lines) == sparse
    assert {line["rows_held"] for line in lines if line["method"]} == {config["max_position_embeddings"]}
    assert "no weights are read" in done.stderr
