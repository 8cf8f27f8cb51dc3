"""The command that makes SmolLM2's artefact and the one that judges it, with a tiny random model of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("faiss")

import transformers

from scripts.evidence import documents, tables
from scripts.evidence.derived import ORDER
from scripts.saap.cards import write_card
from scripts.smollm2 import __main__ as command
from scripts.smollm2 import judge
from scripts.smollm2.windows import trace_of, windows
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.traces.trace import Trace
from sparseattn.training import Filters, Recipe

TOKENS = 300
RECIPE = Recipe(
    clusters=8,
    sample=256,
    iterations=3,
    hidden=8,
    steps=6,
    batch=16,
    queries=64,
    validate=3,
    residual=True,
    filters=Filters(gap=63, near=32, sink=4),
)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def read(name: str) -> str:
    draw = torch.Generator().manual_seed(sum(name.encode()))
    return bytes(torch.randint(32, 127, (5 * TOKENS,), generator=draw).tolist()).decode()


def test_windows_do_not_overlap_and_the_last_is_held_out() -> None:
    found = windows(None, {"alice": 3, "click": 2}, TOKENS, read)
    assert [one.name for one in found] == [
        "alice-00",
        "alice-01",
        "alice-02",
        "alice-03",
        *(f"click-0{i}" for i in "012"),
    ]
    assert [one.held_out for one in found] == [False, False, False, True, False, False, True]
    text = read("alice").encode()
    places = [text.index(bytes(one.ids[0].tolist())) for one in found[:4]]
    assert places == [0, 400, 800, 1200]
    with pytest.raises(ValueError, match="alice has 1500 tokens, 6 windows of 300 are wanted of it"):
        windows(None, {"alice": 5}, TOKENS, read)


def test_killed_anywhere_it_goes_on(model: Any, tmp_path: Path) -> None:
    """Stopped in a capture, in training and before the artefact is put in its place; nothing is done twice."""
    every = windows(None, {"alice": 2, "click": 1}, TOKENS, read)
    out, work = tmp_path / "ships" / "a.safetensors", tmp_path / "work"
    done: list[str] = []

    def stop_at(what: str) -> Any:
        def progress(now: str, at: int, total: int) -> None:
            done.append(now)
            if now == what and at:
                raise KeyboardInterrupt

        return progress

    for what in ("capture alice-01", "layer 0 classifier", "layer 1 classifier"):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            command.make(model, every, work, out, RECIPE, stop_at(what))
        assert not out.exists()
    assert not {"capture alice-00", "layer 0 k-means"} & set(done), "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "LARGEST", 10)
        with pytest.raises(ValueError, match=r"an artefact that ships has at most 10"):
            command.make(model, every, work, out, RECIPE)
    done.clear()
    made = command.make(model, every, work, out, RECIPE, stop_at(""))
    assert done == [], "trained before"
    assert tuple(made.layers) == (0, 1)
    assert [len(made.meta[part]) for part in ("train", "held_out")] == [3, 2]
    assert Artefact.load(out).meta == made.meta
    other = Recipe(**{**vars(RECIPE), "seed": 1})
    assert command.finished(work / out.name, other, every) is None

    write_card(tmp_path / "README.md", "# Another\n\nstays")
    for _ in range(2):
        write_card(tmp_path / "README.md", command.card(out, made))
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Another\n\nstays\n\n# SAAP artefact of SmolLM2\n")
    assert text.count("alice: Lewis Carroll") == 1

    with torch.no_grad(), SparseCache(model, f"saap:artefact={out}", budget=32, sink=4, window=16, seal=16) as cache:
        model(every[0].ids[:, :200], **cache_argument(cache))
        model(every[0].ids[:, 200:201], **cache_argument(cache))
        assert [one.selector for one in cache.stats().layers] == [f"saap:artefact={out}"] * 2
    lacking = Artefact({1: made.layers[1]}, ropes={1: made.ropes[1]}, meta=made.meta)
    lacking.save(tmp_path / "lacking.safetensors")
    spec = f"saap:artefact={tmp_path / 'lacking.safetensors'}"
    with pytest.raises(
        ValueError, match=r"layer 0: the artefact of smollm2 holds layers 1, layer 0 is asked for: .+dense"
    ):
        SparseCache(model, spec, budget=32)
    for asked in ({"dense_layers": [0]}, {"selector": {0: "quest", "default": spec}}):
        with SparseCache(model, **({"selector": spec} | asked), budget=32) as cache:
            assert cache.stats().layers[1].selector is not None


def test_tables_of_a_record() -> None:
    record: dict[str, Any] = {"layers": [2, 6], "heads": 2, "prompts": {}}
    for k, name in enumerate(judge.PROMPTS):
        methods = {
            method: [
                {"rows": rows, "bytes_share": 0.1, "recovered": [[0.9, 0.1 * (i + 1), 0, 0], [0.02 * k * (i + 1)] * 4]}
                for rows in (82, 256)
            ]
            for i, method in enumerate((*ORDER, *sorted(set(judge.METHODS) - set(ORDER))))
        }
        record["prompts"][name] = {"indexed_mass": [[0.2, 0.5, 0.1, 0.1], [0.4] * 4], "methods": methods}

    def shown(name: str, where: str = "") -> str:
        return documents.table(tables.defined()[name], "saap", where, lambda _: record)

    assert "| 2 | 3 of 12 |" in shown("saap-layers", "prompt=prose|code|workshop"), (
        "heads that look near count for nothing"
    )
    assert "| 2 | 1 of 4 |" in shown("saap-layers", "prompt=needles")
    made = shown("saap-order")
    assert "| 2 | 0.10, 0.10 | 0.20, 0.20 | 0.30, 0.30 | 4 of 4 | 4 of 4 |" in made
    assert "| 6 | 0.03, 0.03 | 0.06, 0.06 | 0.09, 0.09 | 6 of 8 | 6 of 8 |" in made, "the first prompt's are all 0"
    assert "| `kmeans` | 0.02, 0.02 |" in shown("saap-prompts"), "the mean over heads, not layers"
    counted = {
        name: documents.reference("saap.groups", f"sum({name}[few=True])", lambda _: record)
        for name in ("in_order", "reversed")
    }
    assert counted == {"in_order": 10, "reversed": 0}


def test_what_was_measured_is_not_measured_again(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "LAYERS", (0, 1))
    monkeypatch.setattr(judge, "BUDGETS", (16, 32))
    monkeypatch.setattr(judge, "PROMPTS", {"alice": 2})
    (window,) = windows(None, {"alice": 1}, TOKENS, read)[:1]
    path = tmp_path / "alice.safetensors"
    methods = {"exact": "exact", "quest": "quest"}
    first = judge.judged({"alice": trace_of(model, window, path)}, methods, tmp_path / "judge")
    monkeypatch.setattr(judge, "evaluate_budgets", lambda *_, **__: pytest.fail("measured again"))
    again = judge.judged({"alice": Trace.open(path)}, methods, tmp_path / "judge")
    assert again == first == json.loads(json.dumps(first))
    assert [len(first["alice"]["indexed_mass"]), len(first["alice"]["indexed_mass"][0])] == [2, 4]
    assert first["alice"]["methods"]["quest"][1]["rows"] == 32
