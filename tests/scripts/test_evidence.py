"""Documents are what the records give, and the steps that make records go on, skip, and fail one by one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.project.test_docs import check

pytest.importorskip("rich")

from scripts.evidence import condensing, documents, frames, labels, made, pictures, tables, toml
from scripts.evidence.__main__ import main
from scripts.evidence.documents import BLOCK, CLAIM, FENCE, NUMBER, stray
from scripts.evidence.expressions import Scope, evaluate, filled
from scripts.evidence.markdown import linked, shown
from scripts.evidence.running import order, run
from scripts.evidence.step import OUT, REPORTED, RESULTS, Step
from scripts.evidence.steps import DEFINED, STEPS
from sparseattn.evaluation.attention_stats import inspect_trace
from sparseattn.evaluation.by_head import at_bytes, at_rows
from sparseattn.evaluation.recall_sweep import Problem, curves
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.recommend.defaults import METHODS
from sparseattn.selectors import methods
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.traces.synthetic import synthetic

# What stands in documents outside of blocks with a unit of measurement and is no measurement of ours, by document:
# parts of lines, with the reason.
DESIGNED: dict[str, tuple[str, ...]] = {
    "README.md": ("about 3 GB of disk", "SmolLM2 (89 MiB)"),  # sizes of what pip installs and fetches
    "docs/use/eval.md": (
        *("95 % intervals", "answers less than 80 %"),
        *("A reply may have 16 MiB", "event of a stream 1 MiB"),  # limits
    ),
    "docs/use/gpu.md": (
        "Most GPUs report up to 7 % more",  # 2^30 bytes are 1.07 x 10^9
        *("a GPU with 24 GB", "add up to 8 minutes", "With less than 48 GiB"),  # what benchmarks/gpu.sh asks for
    ),
    "docs/index.md": ("20 % means that nothing was found",),
    "docs/lab/results/eval.md": (
        "so **20 % is nothing found**",
        "answers less than 80 %",  # a bound
        "Wilson's 95 % interval",
    ),
    "docs/lab/results/reuse.md": ("95 % or more of what", "less than 95 % of what"),  # what counts as near
    "docs/lab/results/speed.md": ("1.8 times dense",),  # an aim
    "docs/lab/saap.md": (
        "80 % or more of what one exact choice",
        "less than 50 % of it",
    ),  # what counts as well and as badly
    "docs/reference/threats.md": ("16 MiB of a reply, 1 MiB of an event",),  # limits
    "docs/lab/results/traces.md": (
        "that hold 20 % or more",  # a bound
        *("89 % of the attention is recovered", "top 1 % of 100,000 tokens"),  # the paper's
    ),
    "docs/use/choosing.md": (
        "5 % of the rows",  # a budget
        "take 6.2 % of the memory",  # 1/16, and a byte a page
        "to stay within 1 % mean output error",  # a bound
    ),
    "docs/use/recommend.md": ("so 1 % more",),  # what a bound means
    "docs/lab/memory.md": ("32 KiB here", "no more of them than 64 MiB"),  # a segment of a table; a limit
    "docs/use/quickstart.md": ("89 and 227 MiB", "260 and 543 MiB"),  # sizes of files pinned by their hash
    "docs/use/troubleshooting.md": ("is 5 %", "takes 1.2 GB"),  # a budget; a formula of docs/use/training.md
    # The plan's formulas in numbers; a test holds the first line to real files.
    "docs/use/training.md": (
        *("| a trace on disk", "| all traces", "| the same with all queries", "| memory of capture"),
        *(
            "| memory of training",
            "| states of training",
            "| artefact, float16",
            "add 200 kB to 201 MB",
            "takes 296 GB",
            "17 GB per prompt",
        ),
    ),
}
AWAITED = frozenset(step.name for step in STEPS) - made.read().keys()  # of steps that were never run: blocks are empty
TABLES = tables.defined()


def test_what_made_a_record_is_noted_under_a_lock_that_follows_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "WORK", tmp_path)
    step = STEPS[0]
    step.record(tmp_path).write_text("{}")
    (tmp_path / "victim").write_bytes(b"dear")
    (tmp_path / "made.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match=r"made\.lock is a symbolic link"):
        made.note(step, 1.0, tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"dear"
    (tmp_path / "made.lock").unlink()
    made.note(step, 1.0, tmp_path)
    assert made.state(step, made.read(tmp_path), tmp_path) == made.MADE


def test_documents_are_what_the_records_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == bool(AWAITED)
    said = capsys.readouterr().out.splitlines()
    missing = re.compile("there is no record ([\\w-]+).json")
    other = [line for line in said if not ((found := missing.search(line)) and found[1] in AWAITED)]
    assert not other


def test_no_measured_number_is_typed_by_hand() -> None:
    for path in documents.documents():
        name = path.relative_to(RESULTS.parent.parent).as_posix()
        typed = [line for line in stray(path.read_text()) if not any(one in line for one in DESIGNED.get(name, ()))]
        assert not typed, f"{name}: measured numbers outside of blocks:\n" + "\n".join(typed)


def test_every_record_is_made_by_a_step_that_parses() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} - {"made"} <= {step.name for step in STEPS}
    known = [step.name for step in STEPS]
    assert len(set(known)) == len(known)
    for at, step in enumerate(STEPS):
        assert OUT in step.command or step.left == "output.txt"
        assert set(step.needs) <= set(known[:at]), f"{step.name} comes before what it needs"
        for words in step.commands():
            check(words)


def test_plans_are_beside_the_methods_that_they_choose_from() -> None:
    words = toml.read(DEFINED)["words"]["PLANNED"]
    assert words == " ".join(f"--selector {shlex.quote(method)}" for method in METHODS)


def test_every_block_has_its_record_and_every_record_its_step() -> None:
    texts = [path.read_text() for path in documents.documents()]
    blocks = [found for text in texts for found in BLOCK.finditer(text)]
    assert blocks
    assert {found["table"] for found in blocks} == set(TABLES), "a table that no document shows"
    needed = {name.strip() for found in blocks for name in found["records"].split(",")}
    needed |= {
        found["source"].partition(".")[0] for text in texts for found in (*NUMBER.finditer(text), *CLAIM.finditer(text))
    }
    there = {path.stem for path in RESULTS.glob("*.json")} - {"made"}
    assert needed - AWAITED <= there | {frames.REGISTRY, frames.SYSTEMS} | {
        path.stem for path in REPORTED.glob("*.json")
    }
    assert made.read().keys() == there
    for found in blocks:  # no number without its record
        assert bool(found["body"]) == (not AWAITED & {name.strip() for name in found["records"].split(",")}), found[0]


def test_every_picture_is_shown_and_has_its_records() -> None:
    shown = "".join(path.read_text() for path in documents.documents())
    for name, picture in toml.read(pictures.DEFINED).items():
        assert re.search(rf"!\[.+\]\((?:[./]|docs/)*figures/{name}\.svg\)", shown), f"no document shows {name}.svg"
        assert {step.name for step in STEPS} >= set(picture["records"])


def test_what_others_measured_says_who_and_what_is_not_known() -> None:
    reported = list(REPORTED.glob("*.json"))
    assert reported
    for path in reported:
        assert not (RESULTS / path.name).exists(), f"{path.stem} is a record of ours, too"
        told = json.loads(path.read_text())["reported"]
        assert all(told[name] for name in ("by", "date", "of", "unsaid")), path


# Expressions, tables and references

ROWS: list[dict[str, Any]] = [
    {"typed": "quest", "budget": 64, "at": 64, "kl": 0.5, "text": "a", "mean.mass": 0.9},
    {"typed": "quest", "budget": 64, "at": 64, "kl": 0.25, "text": "b", "mean.mass": 0.7},
    {"typed": "quest", "budget": 256, "at": 256, "kl": 0.125, "text": "a", "mean.mass": None},
    {"typed": "window", "budget": None, "at": None, "kl": 2.0, "text": "a", "mean.mass": 0.1},
]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("kl", 0.71875),  # the mean of all rows
        ("1e3 * kl / 2 - 1", 358.375),
        ("-max(kl)", -2.0),
        ("mass", (0.9 + 0.7 + 0.1) / 3),  # what is not known counts for nothing
        ("by(text, kl)", [0.875, 0.25]),
        ("count(mass)", 3),
        ("distinct(text)", ["a", "b"]),
        ("fewest(text, budget)", 1),
        ("0.1 < kl <= 1 and max(kl) == 2", True),
        ("min(kl) > 1", False),
        ("round(max(kl) / 3, 1)", 0.7),
    ],
)
def test_values_of_expressions(expression: str, value: Any) -> None:
    assert evaluate(expression, Scope(ROWS)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("expression", "alike", "words"),
    [
        ("kl +", False, "is no expression"),
        ("__import__('os')", False, "cannot have \"__import__('os')\" in it"),
        ("kl.real", False, "no column 'kl.real'"),
        ("text", False, "these differ and have no mean: 'a' and 'b'"),
        ("budget", True, "the rows differ in budget"),
    ],
)
def test_expressions_that_say_nothing(expression: str, alike: bool, words: str) -> None:
    with pytest.raises((ValueError, LookupError), match=re.escape(words)):
        evaluate(expression, Scope(ROWS, alike=alike))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{max(kl):.2f} ({min(mass):.0%})", "2.00 (10 %)"),
        ("{typed:name}[, {budget:,}]", "all of it"),  # a part that is not known is left out
        ("{kl:.1f}, {budget}", ""),  # and all of it outside of brackets
        ("[log](log.md), {kl:~2}", "[log](log.md), 2.0"),
    ],
)
def test_templates(template: str, text: str) -> None:
    rows = ROWS if "min" in template else ROWS[3:]
    assert filled(template, Scope(rows), {"window": "all of it"}) == text


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (3.68, "~2", "3.7"),
        (1234.0, "~2", "1,234"),
        (0.0868, "~2%", "8.7 %"),
        (0.056, ".0p", "6"),
        (-0.25, "+.1%", "-25.0 %"),
        (0, "~2", "0"),
        ("kascade:artefact=/a/b.safetensors,anchors=1", "spec", "kascade:anchors=1"),
    ],
)
def test_formats(value: Any, form: str, text: str) -> None:
    assert shown(value, form) == text


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("Quest(page=8, int8=True)", "quest:page=8,int8=True"),
        ("Exact(group='softmax')", "exact:group=softmax"),
        ("Window()", "window"),
        ("Tailed(inner=LowBit(bits=1, scales=8), rows=64)", "tailed:inner=[lowbit:bits=1,scales=8],rows=64"),
        ("Tailed(inner=LowBit, rows=64)", "tailed:inner=lowbit,rows=64"),
        ("QueryBridge, 8-bit rows", "bridge, kivi:bits=8 rows"),
        ("Kascade(artefact='/a,b.safetensors', anchors=[1, 2])", "kascade:artefact='/a,b.safetensors',anchors=[1,2]"),
        ("exact, one choice a group", "exact, one choice a group"),
        ("Plan(a; 0: quest at 64)", "Plan(a; 0: quest at 64)"),
        ("a novel", "a novel"),
    ],
)
def test_labels_of_old_records_are_read_as_one_types_them(label: str, text: str) -> None:
    assert labels.typed(label) == labels.typed(text) == text
    record = {
        "settings": {"label": label, "why": label},
        "columns": ["why", "method"],
        "records": [[label, label], [label, None]],
        "by_layer": [{"left_out": {label: label}}],
    }
    assert labels.relabelled(record) == {
        "settings": {"label": text, "why": label},
        "columns": ["why", "method"],
        "records": [[label, text], [label, None]],
        "by_layer": [{"left_out": {text: label}}],
    }


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("kascade:artefact=/a/b.safetensors,anchors=1", "kascade:anchors=1"),
        ("tailed:inner=[saap:artefact='/a,b]'],rows=0", "tailed:inner=saap,rows=0"),
        ("tailed:inner=[saap:artefact=x,probes=4], kivi:bits=4 rows", "tailed:inner=[saap:probes=4], kivi:bits=4 rows"),
        ("quest:page=8", "quest:page=8"),
        ("exact, one choice a group", "exact, one choice a group"),
    ],
)
def test_tables_leave_out_where_an_artefact_lay(label: str, text: str) -> None:
    assert shown(label, "spec") == text


def test_every_method_of_a_record_can_be_typed() -> None:
    load = frames.loader()
    rows = [row for path in RESULTS.glob("*.json") for row in frames.rows(path.stem, load(path.stem))]
    every = {row["typed"].partition(", ")[0] for row in rows}
    methods = [name for name in every if name.partition(":")[0] in SELECTORS]
    assert [make_selector(name).label() for name in methods]
    assert not [name for name in every if name[:1].isupper() and not name.startswith("Plan(")]


@pytest.mark.parametrize(
    ("paper", "text"),
    [
        ("OOD-DiskANN, 2211.12850", "OOD-DiskANN, [2211.12850](https://arxiv.org/abs/2211.12850)"),
        ("a, https://x.org/a.b/, 2", "a, [x.org/a.b](https://x.org/a.b/), 2"),
        ("ours", "ours"),
    ],
)
def test_papers_are_links(paper: str, text: str) -> None:
    assert linked(paper) == text


def test_the_registry_is_a_source_of_tables() -> None:
    load = frames.loader()
    rows = frames.read(load, frames.REGISTRY)
    assert [row["method"] for row in rows] == list(methods.METHODS)
    assert next(row for row in rows if row["method"] == "quest")["row"] == 2 * 2 * 8 * 128 / 16  # of 8 heads


def test_every_system_is_told_of_and_its_rule_is_tested() -> None:
    rows = frames.read(frames.loader(), frames.SYSTEMS)
    here = [row for row in rows if row["kind"] == "here"]
    assert len(here) > len(methods.METHODS), "codecs and roles are there too"
    for row in here:
        text = (Path(__file__).parents[2] / row["where"].strip("`")).read_text()
        kind = row["here"]
        name = re.findall(r"`(\w+)", row["system"] + row["here"])[0]
        known = methods.METHODS[name].kind if kind == "method" else name
        assert known.lower() in text.lower(), f"{row['where']} says nothing of {name}"
    for row in rows:
        assert row["kind"] == "here" or row["why"]


MARKED = """# A

<!-- from a: t where=1 -->
OLD
<!-- end -->

Quest has 1 %<!-- = a: kl[quest 64] | .1% -->, twice
{{ms}}<!-- = a: 2 * max(kl[text=a|b budget=64]) -->.
<!-- holds a: kl[quest 64] < kl[window] -->
"""


def test_tables_and_numbers_are_drawn_from_records() -> None:
    defined = {"t": {"index": [["", "`{typed}`"]], "columns": [["KL", "{kl:.2f}"]]}}
    record = {"columns": ["method", "budget", "kl", "text", "where"], "settings": {}}
    record["records"] = [[row["typed"], row["budget"], row["kl"], row["text"], 1] for row in ROWS]
    text = MARKED.replace("{{ms}}", "1,234")
    new, wrong = documents.drawn(text, defined, lambda name: record)
    assert not wrong
    assert new == text.replace("OLD", "| | KL |\n| --- | ---: |\n| `quest` | 0.29 |\n| `window` | 2.00 |").replace(
        "1 %<", "37.5 %<"
    ).replace("1,234<", "1.0<")
    assert documents.drawn(new, defined, lambda name: record) == (new, [])
    assert [line.partition(" is ")[0] for line in documents.differing(text, new)] == ["block a: t", "1 %", "1,234"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- from b: t -->\n3 ms\n<!-- end -->\n", "no record b.json"),
        ("<!-- from a: u -->\n3 ms\n<!-- end -->\n", "no table 'u'"),
        ("<!-- from a: t -->\n3 ms\n", "not closed"),
        ("<!-- from a: t typed=h2o -->\n3 ms\n<!-- end -->\n", "no rows are left"),
        ("It has 3<!-- = a: kl[quest] -->.", "several budgets"),
        ("It has 3<!-- = a: kl[h2o] -->.", "no row is of 'h2o'"),
        ("It has 3<!-- = a: mse[quest 64] -->.", "no column 'mse'"),
        ("It has 3<!-- = a: kl -->.", "the rows differ in kl"),
        ("It has many<!-- = a: kl[quest 64] -->.", "has no number before it"),
        ("It has\n3\n<!-- = a: kl[quest 64] -->.", "a line begins with the comment"),
        ("<!-- holds a: kl[quest 64] > kl[window] -->", "this does not hold of a: kl[quest 64] > kl[window]"),
        ("<!-- holds a: kl[quest 64] -->", "this does not hold"),
    ],
)
def test_what_is_wrong_with_a_document(tmp_path: Path, text: str, words: str) -> None:
    defined = {"t": {"index": [["", "`{typed}`"]], "columns": [["KL", "{kl:.2f}"]]}}
    record = {"columns": ["method", "budget", "kl"], "settings": {}}
    record["records"] = [[row["typed"], row["budget"], row["kl"]] for row in ROWS]
    (tmp_path / "a.json").write_text(json.dumps(record))
    new, wrong = documents.drawn(text, defined, frames.loader(tmp_path))
    assert any(words in one for one in wrong)
    without = "no record" in words or "no rows" in words  # a number without its record is nobody's
    assert new == (text.replace("3 ms\n", "") if without else text)


def test_numbers_outside_of_blocks_are_found() -> None:
    text = "<!-- from a: b -->\n3 ms\n<!-- end -->\n\n```text\n5 %\n```\n\n`7 s`, 8 heads, 16 bits\n\nIt took 9.5 s.\n"
    assert stray(text + "\nIt reads 4 %<!-- = a: b -->.\n") == ["It took 9.5 s."]
    assert FENCE.search(text)


# Steps


WRITES = 'open(sys.argv[1] + "/bench.jsonl", "a").write({!r})'


def step(name: str, value: int = 1, **more: object) -> Step:
    """Of a command that measures `value`."""
    return made_by(name, WRITES.format(f'{{"x": {value}}}\n'), **more)


def made_by(name: str, code: str, **more: object) -> Step:
    command = shlex.join(["python", "-c", f"import sys; {code}", OUT])
    return Step(name, "a test", command, 0.1, "bench.jsonl", **more)  # type: ignore[arg-type]


def test_what_is_there_is_skipped_and_what_differs_runs_again(tmp_path: Path) -> None:
    results, work, said = tmp_path / "results", tmp_path / "work", []
    table = (step("a"), step("b", needs=("a",)))
    assert run(table, table, said.append, results, work) == {}
    assert [made.state(one, made.read(results), results) for one in table] == [made.MADE] * 2
    assert not any(work.iterdir())
    record = json.loads((results / "a.json").read_text())
    assert condensing.rows(record) == [{"x": 1}]
    (results / "a.json").write_text("{}")
    assert run(table[:1], table, said.append, results, work, again=True) == {}
    assert json.loads((results / "a.json").read_text()) == record | {"seconds": pytest.approx(record["seconds"], abs=9)}

    stamp = (results / "a.json").stat().st_mtime_ns
    said.clear()
    assert run(table, table, said.append, results, work) == {}
    assert said == ["2 of 2 steps are there already"]
    assert (results / "a.json").stat().st_mtime_ns == stamp

    other = step("a", 2)
    assert made.state(other, made.read(results), results) == made.OTHER
    run((other,), table, said.append, results, work)
    assert condensing.rows(json.loads((results / "a.json").read_text())) == [{"x": 2}]
    (results / "a.json").write_text("{}")
    assert made.state(other, made.read(results), results) == made.CHANGED
    (results / "a.json").unlink()
    assert made.state(other, made.read(results), results) == made.MISSING


def test_a_step_that_fails_is_told_and_does_not_lose_the_others(tmp_path: Path) -> None:
    results, work, said = tmp_path / "results", tmp_path / "work", []
    fails = made_by("fails", "print('why'); sys.exit(3)")
    empty = made_by("empty", WRITES.format(""))
    table = (fails, step("after", needs=("fails",)), empty, step("last"))
    failed = run(table, table, said.append, results, work)
    assert list(failed) == ["fails", "after", "empty"]
    assert "exit status 3" in failed["fails"]
    assert "needs fails" in failed["after"]
    assert "measured nothing" in failed["empty"]
    assert (fails.folder(work) / "output.txt").read_text() == "why\n"  # a step that failed goes on in its folder
    assert [path.name for path in results.glob("*.json")] != []
    assert made.state(table[-1], made.read(results), results) == made.MADE


def test_a_run_that_was_not_finished_is_no_record(tmp_path: Path) -> None:
    half = Step("half", "a test", "python x OUT", 1, "speed-cpu.json")
    (tmp_path / "speed-cpu.json").write_text('{"complete": false}')
    with pytest.raises(ValueError, match="not finished"):
        condensing.keep(half, tmp_path, tmp_path / "half.json")


def test_names_of_steps() -> None:
    table = (step("a"), step("b"))
    assert [one.name for one in order(table, ["b"])] == ["b"]
    assert order(table, []) == list(table)
    with pytest.raises(ValueError, match="no step 'c'; there are a, b"):
        order(table, ["c"])


def test_a_record_is_small() -> None:
    lines = [
        {"a": 1, "mean": {"mass": 0.123456789}, "heads": {"mass": [[0.5, None], [1.0, 0.0]]}, "date": "x", "b": n}
        for n in range(2)
    ]
    record = condensing.condensed(step("a"), lines)
    assert record["settings"] == {"a": 1, "mean.mass": 0.123456789, "layers.mass": [0.5, 0.5]}
    assert record["columns"] == ["b"]
    assert record["date"] == "x"
    assert json.loads(condensing.dumped(record)) == record
    assert condensing.rounded([0.123456789, 7, None]) == [0.12346, 7, None]


def test_a_step_may_set_the_environment_of_its_command(tmp_path: Path) -> None:
    step = Step("a", "a test", "A_B=OUT/cache sparseattn bench --out OUT", 1, "bench.jsonl")
    assert step.runs(tmp_path) == [
        ["env", f"A_B={tmp_path}/cache", sys.executable, "-m", "sparseattn", "bench", "--out", str(tmp_path)]
    ]


# What the commands measure, by the tables of the documents


def record_of(name: str, left: str, lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A record as a step would keep it, read back from its file's text."""
    made_of = Step(name, "a test", "a command", 1, left)
    shared = {"machine": {"cores": 2, "processor": "a", "cuda_devices": []}, "trace_meta": {}}
    record = condensing.condensed(made_of, [{**json.loads(json.dumps(one)), **shared} for one in lines])
    return json.loads(condensing.dumped({**record, "seconds": 1.0}))


def table(name: str, record: dict[str, Any], where: str = "") -> str:
    return documents.table(TABLES[name], "a", where, lambda _: record)


def benched(*lines: tuple[str, Any, dict[str, float]], **more: Any) -> dict[str, Any]:
    """A record of `bench` of (label, budget, means)."""
    shared = {"trace": "t", "tokens": 900, "last": 4, "sink": 4, "window": 64, "layers": [0, 1], **more}
    record = record_of("a", "bench.jsonl", [{**shared, "label": n, "budget": b, "mean": m} for n, b, m in lines])
    record["settings"]["trace.model"] = "m"
    return record


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, Any]]:
    """Records of a tiny trace, by the functions that the commands call."""
    trace = synthetic(1200, heads=1, group=2, size=16, gap=0.3, sinks=1)
    found = [
        one
        for name, budgets in (("exact", (256, 1024)), ("quest", (256, 1024)), ("window", (256,)))
        for one in evaluate_budgets(trace, name, budgets, Replay(last=2))
    ]
    bench = record_of("bench", "bench.jsonl", [one.record(per_head=True) for one in found])
    bench["by_layer"] = [
        condensing.compared(json.loads(json.dumps(one.record()))) for one in (at_rows(found, 256), at_bytes(found, 0.3))
    ]
    task = {"queries to keys": [Problem.of(trace.layer(0), trace.positions, 8)]}
    task["keys to keys"] = [Problem.of(trace.layer(0), trace.positions, 8, held_out=True)]
    lines = [
        {"source": "a", "direction": direction, "label": "bridge", "gap": None, **one}
        for direction, curve in curves(make_selector("bridge"), task, k=20, values=[1, 4]).items()
        for one in curve.records()
    ]
    return {
        "bench": bench,
        "recall": record_of("recall", "recall.jsonl", lines),
        "inspect": record_of("inspect", "inspect.jsonl", inspect_trace(trace, last=2).records()),
    }


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("bench-table", "bench", "| `quest`, 256 |"),
        ("bench-short", "bench", "| `window` |"),
        ("layers", "bench", "of the cache's bytes, share recovered"),
        ("wins", "bench", "324 rows | "),
        ("equal", "bench", "at 324 rows, the least error first"),
        ("by-error", "bench", "| `exact` |"),
        ("inspect-short", "inspect", "| `synthetic"),
        ("inspect-layers", "inspect", "| all |"),
        ("recall", "recall", "| `bridge` |"),
    ],
)
def test_tables_of_what_the_commands_measure(
    traced: dict[str, dict[str, Any]], name: str, record: str, words: str
) -> None:
    assert words in table(name, traced[record])


PICTURES = ("frontier-prose", "layers-prose", "inspect-prose", "recall-traces")


@pytest.mark.parametrize(
    ("name", "twice"),
    [
        *((name, name == "layers-prose") for name in PICTURES),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in PICTURES if name != "layers-prose"),
    ],
)
def test_pictures_of_what_the_commands_measure(
    traced: dict[str, dict[str, Any]], name: str, twice: bool, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture, path, again = toml.read(pictures.DEFINED)[name], tmp_path / "a.svg", tmp_path / "b.svg"
    records = [traced["bench" if "bench" in one else one.partition("-")[0]] for one in picture["records"]]
    pictures.draw(picture, records, path)
    if twice:
        pictures.draw(picture, records, again)
        assert path.read_bytes() == again.read_bytes(), "of the same records, to the byte"
    assert pictures.stamped(path) is None
    stamp = pictures.stamp(picture, records)
    pictures.mark(path, stamp)
    assert pictures.stamped(path) == stamp
    assert pictures.stamp({**picture, "drop": {"label": "Quest"}}, records) != stamp, "how it is drawn counts too"


SETTINGS = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}


def test_tables_of_agreement() -> None:
    shared = {"task": "agreement", "kind": "novel", "length": 512, "prompt": "x", "protocol": "forced"}
    shared |= {
        "scored_tokens": 16,
        "nll": 1.0,
        "nll_difference": 0.5,
        "same_top": 0.75,
        "rows": 9.0,
        "bytes_share": 0.1,
    }
    lines = [
        {**shared, "text": name, "start": at, "method": method, "budget": budget, "kl": kl, "settings": SETTINGS}
        for name in ("a", "b")
        for at, kl in ((0, 0.25), (1, 0.5), (2, 0.75))
        for method, budget in (("full", None), ("quest", "64"), ("window", None))
    ]
    lines += [{**one, "layers": "2-5"} for one in lines if one["method"] == "window"]
    record = record_of("agreement", "eval.jsonl", lines)
    assert record["settings"]["model"] == "m"
    assert "3 windows of each text" in " ".join(table("agreement", record).split())
    assert "| `quest`, 64 | 9 | 10 % | 0.500 (0.000-1.121) | 75 % |" in table("agreement", record)
    assert "| `window`, layers 2-5 | 9 | 10 % |" in table("agreement", record)
    assert "| `window` | 0.500, 75 % |" in table("agreement-short", record)
    assert "| `window` | +0.500 | +0.500 |" in table("perplexity", record)


def test_what_full_attention_does_not_answer_is_no_column() -> None:
    shared = {"length": 512, "protocol": "question", "settings": SETTINGS}
    lines = [
        {**shared, "task": task, "method": method, "budget": budget, "prompt": str(seed), "score": score}
        for task, score in (("passkey", 1.0), ("kv", 0.0))
        for method, budget in (("full", None), ("quest", "64"))
        for seed in (0, 1)
    ]
    shown = table("asked", record_of("asked", "eval.jsonl", lines))
    assert "| method, budget | passkey, 512 |" in shown
    assert "kv" not in shown


def test_passkeys_by_protocol() -> None:
    answered = {("full", "question"): 1, ("full", "prefill"): 1, ("snapkv", "prefill"): 1, ("quest", "question"): 1}
    shared = {"task": "passkey", "length": 512, "prompt": "x", "settings": SETTINGS}
    lines = [
        {
            **shared,
            "protocol": protocol,
            "method": method,
            "budget": budget,
            "score": float(answered.get((method, protocol), 0)),
        }
        for method, budget in (("full", None), ("snapkv", "64"), ("quest", "64"))
        for protocol in ("question", "prefill")
    ]
    shown = table("protocols", record_of("passkey", "eval.jsonl", lines))
    assert "| `full attention` | 100 % | 100 % |" in shown
    assert "| `snapkv`, 64 | 0 % | 100 % |" in shown
    assert "| `quest`, 64 | 100 % | 0 % |" in shown


def test_errors_are_compared_at_equal_rows_and_bytes() -> None:
    """A method with half of random's error at every cost; one that another never cost as much has no ratio with it."""

    def line(label: str, budget: int, attended: float, error: float) -> tuple[str, int, dict[str, float]]:
        return label, budget, {"attended": attended, "bytes_share": attended / 1000, "relative_error": error}

    record = benched(
        *(line("random", at, at, 1 / at) for at in (100, 200, 400)),
        *(line("kdeformer:rows=0", at, at, 1.5 / at) for at in (100, 200, 400)),
        *(line("magicpig", at, 150, 0.5 / 150) for at in (100, 200)),
        *(line("kmeans", at, 10 * at, 0.1 / at) for at in (100, 200)),
    )
    assert "| `kdeformer:rows=0` | 1.50 |" in table("errors-at-rows", record, "other=random")
    assert "| `magicpig` | 0.50 |" in table("errors-at-rows", record, "other=random")
    assert "| `kmeans` | |" in table("errors-at-bytes", record, "other=magicpig typed=kmeans|random")


def test_a_tail_is_compared_at_equal_bytes_and_at_equal_budgets() -> None:
    def line(label: str, budget: int, share: float, error: float) -> tuple[str, int, dict[str, float]]:
        return label, budget, {"attended": budget, "bytes_share": share, "relative_error": error, "recovered": 0.5}

    tailed = "tailed:inner=lowbit,rows=64"
    lines = [line("lowbit", at, at / 1000, 0.3 * 100 / at) for at in (100, 200, 400)]
    lines += [line(tailed, at, at / 1000, 0.1 * 100 / at) for at in (100, 200, 400)]
    record = benched(*lines, line("retroinfer:zone=1.0", 100, 0.1, 0.2))
    pair = "typed=tailed:inner=lowbit,rows=64 other=lowbit"
    assert "| `tailed:inner=lowbit,rows=64` | `lowbit` | 0.33 | 0.33 | 0.33 | 0.33 |" in table(
        "tail-errors", record, pair
    )
    assert "| `retroinfer:zone=1.0` | 100 | 10.0 % | 20.0 % | 50 % |" in table("tails", record)


def test_choices_read_again() -> None:
    def line(label: str, scanned: float, read: float, recovered: float) -> tuple[str, int, dict[str, float]]:
        means = {"scanned": scanned, "bytes_share": read, "mass": 0.9, "recovered": recovered, "relative_error": 0.1}
        return label, 256, means

    record = benched(
        line("quest", 50.0, 0.3, 0.8),
        line("exact:group=softmax", 800.0, 0.6, 0.9),
        line("freekv", 40.0, 0.28, 0.79),
        line("freekv:tau=0.5", 5.0, 0.2, 0.4),
        line("kascade:artefact=/a/b.safetensors,anchors=1", 400.0, 0.35, 0.5),
    )
    steps = table("reused-steps", record)
    assert "| `quest`, 256 | 100 % | 30.0 % | 0.900 | 0.800 | 10.0 % |" in steps
    assert "| `freekv`, 256 | 80 % |" in steps
    assert "| `freekv:tau=0.5`, 256 | 10 % | 20.0 % | 0.900 | 0.400 | 10.0 % |" in steps
    assert "| `kascade:anchors=1`, 256 | 50 % | 35.0 % | 0.900 | 0.500 | 10.0 % |" in table("reused-layers", record)


def test_methods_in_an_engine_are_set_beside_those_of_a_cache() -> None:
    found = [
        {"by": by, "selector": "quest:page=32", "budget": budget, "rows": 9.0, "kl": kl}
        for by, budget, kl in (
            ("vLLM", 128, 0.3),
            ("vLLM", 256, 0.1),
            ("SparseCache", 256, 0.2),
            ("SparseCache", 128, 0.2),
        )
    ]
    beside = frames.rows("vllm-rows", {"results": found}, "beside")
    assert [(row["budget"], row["kl_ratio"]) for row in beside] == [
        (128, pytest.approx(1.5)),
        (256, pytest.approx(0.5)),
    ]


def test_tables_of_budgets_by_mass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthetic(600, heads=1, group=2, size=16, gap=0.3)
    lines = [
        evaluate_budgets(trace, name, ["mass:0.7", "mass:0.9"], Replay(last=2))[at].record()
        for name in ("exact", "lowbit:rows=16,group=each", "quest")
        for at in (0, 1)
    ]
    record = record_of("mass", "bench.jsonl", [{**one, "trace.model": "a model"} for one in lines])
    assert "| `exact`, 0.7 | 0." in table("mass", record)
    pruned = evaluate_budgets(trace, "topp:rows=16", [None], Replay(last=2))[0].record()
    record = record_of("topp", "bench.jsonl", [{**pruned, "trace.model": "a model"}])
    assert "| `topp:rows=16` |" in table("topp", record)

    from benchmarks import guarantee

    trace.save(tmp_path / "a.safetensors")
    words = ["--selector", "vattention:epsilon=0.5", "--selector", "vattention:epsilon=0.01@64"]
    guarantee.main([str(tmp_path / "a.safetensors"), *words, "--last", "4", "--results", str(tmp_path)])
    capsys.readouterr()
    record = json.loads((tmp_path / "guarantee.json").read_text())
    assert "| `vattention:epsilon=0.01` | 64 |" in table("guarantee", record)
    assert record["steps"] == len(record["layers"]) * 2 * 4
    with pytest.raises(SystemExit):
        guarantee.main([str(tmp_path / "a.safetensors"), "--selector", "quest", "--results", str(tmp_path)])


def test_tables_of_rows_of_few_bits() -> None:
    """A line for each method and number of bits, beside the same method's rows as they came."""
    record = benched(
        ("quest", 64, {"relative_error": 0.2, "bytes_share": 0.10}),
        ("quest", 1024, {"relative_error": 0.10, "bytes_share": 0.20}),
        ("quest, kivi:bits=4 rows", 64, {"relative_error": 0.21, "bytes_share": 0.06}),
        ("quest, kivi:bits=4 rows", 1024, {"relative_error": 0.12, "bytes_share": 0.08}),
        ("quest, kivi:bits=8 rows", 1024, {"relative_error": 0.10, "bytes_share": 0.15}),
    )
    assert "| `quest` | 16 | 20.0 % | 10.0 % | 10.0 % | 20.0 % |" in table("rows8", record)
    assert "| `quest` | 4 | 21.0 % | 6.0 % | 12.0 % | 8.0 % |" in table("rows8", record)
    assert "| `m`, `quest` | 1.00 | 0.75 | 1.20 | 0.40 |" in table("rows8-cost", record)
    shared = {**SETTINGS, "length": 512, "scored_tokens": 16, "kind": "novel", "text": "a", "start": 0}
    columns = ["method", "budget", "kl", "same_top", "nll", "nll_difference", "bytes_share"]
    lines = [["full", None, 0.0, 1.0, 1.5, 0.0, 1.0], ["quest, kivi:bits=8 rows", "64", 0.25, 0.75, 1.6, 0.1, 0.05]]
    shown = table("rows8-agreement", {"settings": shared, "columns": columns, "records": lines})
    assert "| `quest`, 64 | 8 | 0.2500 | 75 % | +0.1000 | 5.0 % |" in shown
