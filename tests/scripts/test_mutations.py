"""Mutated files of every format (`scripts/mutations.py`): no traceback, and each refusal says where."""

from __future__ import annotations

import pytest

from scripts import mutations
from scripts.mutations import FINE, FORMATS, REFUSED, TIME, TRACEBACK, UNNAMED, Format, Mutation, outcome, run

SEED = 40
FAST, SLOW, PARTS = 120, 5000, 25


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_mutated_was_right(name: str) -> None:
    """Else every mutation of it would be refused for that."""
    data = mutations.valid(name)
    assert outcome(name, Mutation("nothing", (), data if name != "selector" else data.splitlines()[0])).kind == FINE


def test_mutated_files_are_read_or_refused_in_a_sentence() -> None:
    count = run(SEED, range(FAST))
    assert not count.failures, "\n\n".join(count.failures)
    assert set(count.by_format) == set(FORMATS)
    assert count.total(FINE) > FAST // 10, "mutations that are too coarse meet the first check alone"
    assert count.total(REFUSED) > FAST // 2


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_mutated_files_are_read_or_refused_in_a_sentence(part: int) -> None:
    each = SLOW // PARTS
    count = run(SEED + 1, range(part * each, (part + 1) * each))
    assert not count.failures, "\n\n".join(count.failures)


def test_the_script_prints_counts_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--seed", "1", "--count", "4", "--format", "roles", "--format", "plan"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == ["format", "roles", "plan", "all"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise KeyError('layers')", TRACEBACK),
        ("raise RecursionError", TRACEBACK),
        ("raise ValueError('f.json, line 1: layers are wrong')", REFUSED),
        ("raise ValueError('line 1: layers are wrong')", UNNAMED),
        ("raise ValueError('f.json: layers are wrong')", UNNAMED),
        ("raise ValueError('f.json, line 1: something is wrong')", UNNAMED),
        ("raise ValueError('f.json, line 1: layers are\\nwrong')", UNNAMED),
        ("while True: pass", TIME),
        ("pass", FINE),
    ],
)
def test_failures_are_told_from_refusals(code: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that raises something else, says too little or never ends is a failure, with what reproduces it."""
    held = {"__name__": "sparseattn.made_up"}  # a refusal is one of the package's own
    exec(f"def read(path):\n    {code}\n", held)
    read = held["read"]
    form = Format(lambda: b"{}", read, lambda draw, data: Mutation("m", ("layers",), data), "f.json", lines=True)  # type: ignore[arg-type]
    monkeypatch.setitem(mutations.FORMATS, "made up", form)
    monkeypatch.setattr(mutations, "LIMIT", 1)
    mutations.valid.cache_clear()
    count = run(1, [7], ["made up"])
    assert count.by_format["made up"][kind] == 1
    assert len(count.failures) == (kind not in (FINE, REFUSED))
    assert all("--case 'made up:1:7'" in failure for failure in count.failures)


def test_a_library_s_own_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Format(
        lambda: b"{}", lambda path: void(int(path.name)), lambda draw, data: Mutation("m", (), data), "f.json"
    )
    monkeypatch.setitem(mutations.FORMATS, "made up", form)
    mutations.valid.cache_clear()
    assert run(1, [7], ["made up"]).by_format["made up"][TRACEBACK] == 1


def void(_: object) -> None:
    pass
