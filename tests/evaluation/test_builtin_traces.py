"""Built-in traces of real models: named without fetching, made of what is pinned, and their last tokens ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from sparseattn.evaluation import builtin_traces
from sparseattn.evaluation.builtin_traces import BUILTIN, BYTES, LEADING, builtin_trace, needles_bytes, prepare
from sparseattn.models import packaged
from sparseattn.utils.cache_folder import cache_folder

SMOLLM2 = packaged.PACKAGED["smollm2"]


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SmolLM2's folder where it is cached, in a cache folder that holds nothing else."""
    if not SMOLLM2.cached:
        pytest.skip(f"smollm2 is not in {cache_folder()}: `sparseattn models --fetch smollm2` brings it")
    folder = SMOLLM2.folder
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / folder.name).symlink_to(folder)
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    return SMOLLM2.folder


def test_names_follow_what_a_trace_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    assert {*LEADING, *BYTES, "long"} == set(BUILTIN)
    one = BUILTIN["prose"]
    others = [replace(one, text="workshop"), replace(one, tokens=4096), replace(one, layers=(2,))]
    others += [replace(one, model="gemma3-270m"), replace(one, ahead=False)]
    with monkeypatch.context() as patch:
        patch.setattr(builtin_traces, "RECIPE", builtin_traces.RECIPE + 1)
        names = {one.path}
    with monkeypatch.context() as patch:
        patch.setitem(packaged.PACKAGED, "smollm2", replace(SMOLLM2, sha256="0" * 64))
        names.add(one.path)
    assert len(names | {other.path for other in (one, *others)}) == 8
    assert not any(tmp_path.iterdir()), "nothing was fetched"


def test_needles_end_with_their_questions_answered() -> None:
    text = needles_bytes().decode()
    context, asked, answers = text.rpartition("What is the pass key?")
    passkey, _, record = answers.rstrip().rpartition("\n")
    key, value = passkey.partition("\n")[0].split()[-1], record.partition(":")[2]
    assert asked
    assert context.count(f"The pass key is {key}. ") == 1
    assert context.count(f"\n{record}\n") == 1
    assert value.isdigit()


def test_needles_fill_the_tokens_and_the_last_32_hold_both_answers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(needles_bytes().decode())["input_ids"]
    assert builtin_traces.TOKENS - 128 < len(ids) <= builtin_traces.TOKENS
    decoded = tokenizer.decode(ids[-32:])
    key = needles_bytes().decode().rpartition("The pass key is ")[2].partition("\n")[0]
    assert f"is {key}\nWhat is the value of" in decoded


def test_a_trace_of_a_real_model_is_made_once_in_bfloat16(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setitem(BUILTIN, "prose", replace(BUILTIN["prose"], tokens=96, layers=(2, 6)))
    steps: list[tuple[str, int, int]] = []
    prepare("prose")
    made = builtin_trace("prose", lambda *step: steps.append(step))
    assert (made.name, made.tokens, made.layers, made.dtype) == ("prose", 96, (2, 6), torch.bfloat16)
    assert steps == [("built-in trace prose", 96, 96)]
    assert not made.meta["attention_differs"]
    assert all(shape.ahead for shape in made.shapes.values()), "queries foreseen, which InfiniGen goes by"
    assert made.depth == 30
    assert not made.meta["rope_absent"]
    before = BUILTIN["prose"].path.stat()
    assert builtin_trace("prose").meta["model"] == "smollm2"
    assert BUILTIN["prose"].path.stat() == before
