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

from scripts.evidence import condensing, made, pictures
from scripts.evidence.__main__ import main
from scripts.evidence.documents import BLOCK, FENCE, documents, drawn, loader, stray
from scripts.evidence.running import order, run
from scripts.evidence.step import OUT, REPORTED, RESULTS, Step
from scripts.evidence.steps import STEPS
from scripts.evidence.views import VIEWS
from sparseattn.evaluation.attention_stats import inspect_trace
from sparseattn.evaluation.by_head import at_bytes, at_rows
from sparseattn.evaluation.recall_sweep import Problem, curves
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.synthetic import synthetic

# What stands in documents outside of blocks with a unit of measurement and is no measurement of ours, by document:
# parts of lines, with the reason.
DESIGNED: dict[str, tuple[str, ...]] = {
    "README.md": (
        "20 % means that nothing was found",  # one needle of five lies in the window
        "5 % of the rows",  # a budget
    ),
    "docs/eval.md": (
        *("95 % intervals", "answers less than 80 %"),
        *("A reply may have 16 MiB", "event of a stream 1 MiB"),  # limits
    ),
    "docs/index.md": ("20 % means that nothing was found",),
    "docs/results/eval.md": (
        "so **20 % is nothing found**",
        "answers less than 80 %",  # a bound
    ),
    "docs/threats.md": ("16 MiB of a reply, 1 MiB of an event",),  # limits
    "docs/results/traces.md": (
        "that hold 20 % or more",  # a bound
        *("89 % of the attention is recovered", "top 1 % of 100,000 tokens"),  # the paper's
    ),
    "docs/choosing.md": (
        "5 % of the rows",  # a budget
        "take 6.2 % of the memory",  # 1/16, and a byte a page
        "to stay within 1 % mean output error",  # a bound
    ),
    "docs/recommend.md": ("so 1 % more",),  # what a bound means
    "docs/memory.md": ("",),  # scripts/memory_tables.py measures and draws its tables
    "docs/quickstart.md": ("89 and 227 MiB", "260 and 543 MiB"),  # sizes of files pinned by their hash
    "docs/troubleshooting.md": ("is 5 %", "takes 1.2 GB"),  # a budget; a formula of docs/training.md
    # The plan's formulas in numbers; a test holds the first line to real files.
    "docs/training.md": (
        *("| a trace on disk", "| all traces", "| the same with all queries", "| memory of capture"),
        *(
            "| memory of training",
            "| states of training",
            "| artefact, float16",
            "come on top: 200 kB",
            "takes 296 GB",
            "17 GB a prompt",
        ),
    ),
}
AWAITED = frozenset(step.name for step in STEPS) - made.read().keys()  # of steps that were never run: blocks are empty


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
    for path in documents():
        name = path.relative_to(RESULTS.parent.parent).as_posix()
        typed = [line for line in stray(path.read_text()) if not any(one in line for one in DESIGNED.get(name, ()))]
        assert not typed, f"{name}: measured numbers outside of blocks:\n" + "\n".join(typed)


def test_every_record_is_made_by_a_step_that_parses() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} - {"made"} <= {step.name for step in STEPS}
    known = [step.name for step in STEPS]
    for at, step in enumerate(STEPS):
        assert OUT in step.command or step.left == "output.txt"
        assert set(step.needs) <= set(known[:at]), f"{step.name} comes before what it needs"
        for words in step.commands():
            check(words)


def test_every_block_has_its_record_and_every_record_its_step() -> None:
    blocks = [found for path in documents() for found in BLOCK.finditer(path.read_text())]
    assert blocks
    assert {found["view"] for found in blocks} <= set(VIEWS)
    needed = {name.strip() for found in blocks for name in found["records"].split(",")}
    there = {path.stem for path in RESULTS.glob("*.json")} - {"made"}
    assert needed - AWAITED <= there | {path.stem for path in REPORTED.glob("*.json")}
    assert made.read().keys() == there
    for found in blocks:  # no number without its record
        assert bool(found["body"]) == (not AWAITED & {name.strip() for name in found["records"].split(",")}), found[0]


def test_what_others_measured_says_who_and_what_is_not_known() -> None:
    reported = list(REPORTED.glob("*.json"))
    assert reported
    for path in reported:
        assert not (RESULTS / path.name).exists(), f"{path.stem} is a record of ours, too"
        told = json.loads(path.read_text())["reported"]
        assert all(told[name] for name in ("by", "date", "of", "unsaid")), path


def test_the_processor_with_amx_is_told_as_it_was_reported() -> None:
    drawn_words = VIEWS["vllm-reported"](loader()("vllm-amx"))
    assert "| 16 | 187 | 102 | 192 |" in drawn_words
    assert "of 2026-11-23. It comes from the reviewer of issue 40" in " ".join(drawn_words.split())


def test_methods_by_turns_are_told_with_their_processor() -> None:
    seconds = {"stock": {"median": 0.057}, "sparse": {"median": 0.055}}
    one = {"context": 8000, "batch": 4, "seconds": seconds, "tokens_a_second": {"stock": 70.2, "sparse": 72.7}}
    record = {
        "model": "smollm2", "dtype": "bfloat16", "compiled": False, "threads": 2, "features": ["avx2", "amx_bf16"],
        "machine": {"processor": "A", "cuda_devices": []},
        "settings": {"budget": 2048, "dense_layers": 2, "above": 4096},
        "decode": [{**one, "selector": name, "speed_up": {"median": 1.04}} for name in ("quest:page=32", "window")],
    }  # fmt: skip
    words = VIEWS["vllm-turns"](record)
    assert "on 2 cores (A) with AMX" in " ".join(words.split())
    assert "| `window` | 8,000 | 4 | 57 | 70 | 55 | 73 | 1.04 |" in words
    assert "without AMX" in " ".join(VIEWS["vllm-turns"]({**record, "features": ["avx2"]}).split())


def test_a_block_is_what_its_view_makes_of_its_record() -> None:
    views = {"twice": lambda record: f"{2 * record['ms']} ms"}
    text = "# A\n\n<!-- from a: twice -->\nold\n<!-- end -->\n\nb\n"
    new, wrong = drawn(text, views, {"a": {"ms": 3}}.__getitem__)
    assert new == text.replace("old", "6 ms")
    assert not wrong
    assert drawn(new, views, {"a": {"ms": 3}}.__getitem__) == (new, [])


@pytest.mark.parametrize(
    ("text", "words", "left"),
    [
        ("<!-- from b: twice -->\n3 ms\n<!-- end -->\n", "no record b.json", ""),
        ("<!-- from a: thrice -->\n3 ms\n<!-- end -->\n", "no view 'thrice'", "3 ms\n"),
        ("<!-- from a: twice -->\n3 ms\n", "not closed", "3 ms\n"),
    ],
)
def test_a_block_without_its_record_is_empty_and_named(tmp_path: Path, text: str, words: str, left: str) -> None:
    (tmp_path / "a.json").write_text("{}")
    new, (wrong,) = drawn(text, {"twice": lambda record: "x"}, loader(tmp_path))
    assert new == text.replace("3 ms\n", left)
    assert words in wrong


def test_numbers_outside_of_blocks_are_found() -> None:
    text = "<!-- from a: b -->\n3 ms\n<!-- end -->\n\n```text\n5 %\n```\n\n`7 s`, 8 heads, 16 bits\n\nIt took 9.5 s.\n"
    assert stray(text) == ["It took 9.5 s."]
    assert FENCE.search(text)


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


def test_a_picture_says_which_records_it_shows(tmp_path: Path) -> None:
    png = (RESULTS.parent.parent / "docs" / "scaling-cpu.png").read_bytes()
    again = pictures.marked(png.replace(b"tEXtRecords", b"tEXtNothing"), "abc")
    assert pictures.stamped(again) == "abc"
    assert pictures.stamped(pictures.SIGNATURE) is None


def record_of(name: str, left: str, lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A record as a step would keep it, read back from its file's text."""
    made_of = Step(name, "a test", "a command", 1, left)
    shared = {"machine": {"cores": 2, "processor": "a", "cuda_devices": []}, "trace_meta": {}}
    record = condensing.condensed(made_of, [{**json.loads(json.dumps(one)), **shared} for one in lines])
    return json.loads(condensing.dumped({**record, "seconds": 1.0}))


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, Any]]:
    """Records of a tiny trace, by the functions that the commands call."""
    trace = synthetic(1200, heads=1, group=2, size=16, gap=0.3, sinks=1)
    found = [
        one
        for name, budgets in (("exact", (256, 1024)), ("quest", (256, 1024)), ("window", (256,)))
        for one in evaluate_budgets(trace, name, budgets, last=2)
    ]
    bench = record_of("bench", "bench.jsonl", [one.record(per_head=True) for one in found])
    bench["by_layer"] = [
        condensing.compared(json.loads(json.dumps(one.record()))) for one in (at_rows(found, 256), at_bytes(found, 0.3))
    ]
    task = {"queries to keys": [Problem.of(trace.layer(0), trace.positions, 8)]}
    task["keys to keys"] = [Problem.of(trace.layer(0), trace.positions, 8, held_out=True)]
    lines = [
        {"source": "a", "direction": direction, "label": "Bridge", "gap": None, **one}
        for direction, curve in curves(make_selector("bridge"), task, k=20, values=[1, 4]).items()
        for one in curve.records()
    ]
    return {
        "bench": bench,
        "recall": record_of("recall", "recall.jsonl", lines),
        "inspect": record_of("inspect", "inspect.jsonl", inspect_trace(trace, last=2).records()),
    }


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("bench-table", "| `quest`, 256 |"),
        ("bench-short", "| `window` |"),
        ("bench-layers", "of the cache's bytes, share recovered"),
        ("bench-heads", "at 324 rows**: of the methods that do not score every key `quest` recovers"),
        ("rivals-all", "the least error first"),
        ("frontier-equal", "the least error first"),
        ("rivals-order", "Error at 256 rows, the least first: `exact`"),
        ("demo-printed", "Quest       1024"),
        ("inspect-short", "| `synthetic"),
        ("inspect-layers", "| all |"),
        ("inspect-findings", "of the attention lies beyond sink and window"),
        ("recall-table", "| `bridge` |"),
    ],
)
def test_views_of_what_the_commands_measure(traced: dict[str, dict[str, Any]], view: str, words: str) -> None:
    name = "bench" if view.startswith(("bench", "demo", "rivals", "frontier")) else view.partition("-")[0]
    assert words in VIEWS[view](traced[name])


def test_views_of_agreement() -> None:
    shared = {"task": "agreement", "kind": "novel", "length": 512, "prompt": "x", "protocol": "forced"}
    shared |= {
        "scored_tokens": 16,
        "nll": 1.0,
        "nll_difference": 0.5,
        "same_top": 0.75,
        "rows": 9.0,
        "bytes_share": 0.1,
    }
    settings = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}
    lines = [
        {**shared, "text": name, "start": at, "method": method, "budget": budget, "kl": kl, "settings": settings}
        for name in ("a", "b")
        for at, kl in ((0, 0.25), (1, 0.5), (2, 0.75))
        for method, budget in (("full", None), ("Quest", "64"), ("Window", None))
    ]
    lines += [{**one, "layers": "2-5"} for one in lines if one["method"] == "Window"]
    record = record_of("agreement", "eval.jsonl", lines)
    assert record["settings"]["model"] == "m"
    assert "| `quest`, 64 | 9 | 10 % | 0.500 (0.000-1.121) | 75 % |" in VIEWS["agreement-table"](record)
    assert "| `window`, layers 2-5 | 9 | 10 % |" in VIEWS["agreement-table"](record)
    assert "| `window` | 0.500, 75 % |" in VIEWS["agreement-short"](record)
    assert "| `window` | +0.500 | +0.500 |" in VIEWS["agreement-perplexity"](record)


@pytest.mark.parametrize("name", ["frontier-prose", "layers-prose", "inspect-prose", "recall-traces"])
def test_pictures_of_what_the_commands_measure(traced: dict[str, dict[str, Any]], name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [traced[one.partition("-")[0]] for one in pictures.PICTURES[name].records]
    pictures.PICTURES[name].draw(records, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(pictures.SIGNATURE)


def test_a_step_may_set_the_environment_of_its_command(tmp_path: Path) -> None:
    step = Step("a", "a test", "A_B=OUT/cache sparseattn bench --out OUT", 1, "bench.jsonl")
    assert step.runs(tmp_path) == [
        ["env", f"A_B={tmp_path}/cache", sys.executable, "-m", "sparseattn", "bench", "--out", str(tmp_path)]
    ]


def test_what_full_attention_does_not_answer_is_no_column() -> None:
    settings = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}
    shared = {"length": 512, "protocol": "question", "settings": settings}
    lines = [
        {**shared, "task": task, "method": method, "budget": budget, "prompt": str(seed), "score": score}
        for task, score in (("passkey", 1.0), ("kv", 0.0))
        for method, budget in (("full", None), ("Quest", "64"))
        for seed in (0, 1)
    ]
    shown = VIEWS["asked-grid"](record_of("asked", "eval.jsonl", lines))
    assert "| method, budget | passkey, 512 |" in shown
    assert "too few of kv at 512 (0 %): nothing is learned there" in shown


def test_views_of_methods_that_drop_rows_and_of_their_passkeys() -> None:
    settings = {"model": "m", "sink": 4, "window": 64, "dense_layers": 0}
    answered = {("full", "question"): 1, ("full", "prefill"): 1, ("SnapKV", "prefill"): 1, ("Quest", "question"): 1}
    lines = [
        {
            "task": "passkey",
            "length": 512,
            "prompt": "x",
            "protocol": protocol,
            "method": method,
            "budget": None if method == "full" else "64",
            "settings": settings,
            "score": float(answered.get((method, protocol), 0)),
        }
        for method in ("full", "SnapKV", "Quest")
        for protocol in ("question", "prefill")
    ]
    record = record_of("passkey", "eval.jsonl", lines)
    assert "| `snapkv`, 64 | 0 % | 100 % |" in VIEWS["rivals-protocols"](record)
    words = VIEWS["rivals-protocols-findings"](record)
    assert "`snapkv` 0 % and 100 %, `quest` 100 % and 0 %." in " ".join(words.split())
    assert "The question after the prefill is the case that they do not serve." in " ".join(words.split())


def test_findings_of_hashing_follow_the_errors() -> None:
    """A method with half of random's error at every cost is better; one that random never cost as much is unknown."""

    def line(label: str, budget: int, attended: float, error: float) -> dict[str, Any]:
        mean = {"attended": attended, "bytes_share": attended / 1000, "relative_error": error}
        return {"trace": "t", "label": label, "budget": budget, "mean": mean}

    lines = [line("Random", at, at, 1 / at) for at in (100, 200, 400)]
    lines += [line("KDEformer(rows=0)", at, at, 1.5 / at) for at in (100, 200, 400)]
    lines += [line("MagicPIG", at, 150, 0.5 / 150) for at in (100, 200)]
    lines += [line("KMeans", at, 10 * at, 0.1 / at) for at in (100, 200)]
    words = " ".join(VIEWS["rivals-hashed-findings"](record_of("hashed", "bench.jsonl", lines)).split())
    assert "`kdeformer:rows=0` has 1.50 times the error of `random`. That agrees." in words
    assert "`magicpig` has 0.50 times the error of `random`. That agrees." in words
    assert "`kmeans` was not measured where `magicpig` was: that is unknown." in words


def test_findings_of_the_frontier_compare_at_what_the_papers_hold_equal() -> None:
    """RocketKV with half of Quest's error at equal bytes and more than SparQ's; no line of ParisKV without it."""

    def line(label: str, budget: int, error: float) -> dict[str, Any]:
        mean = {"attended": budget, "bytes_share": budget / 1000, "relative_error": error / budget}
        return {"trace": "t", "label": label, "budget": budget, "mean": mean}

    errors = {"RocketKV(ratio=8.0)": 0.5, "Quest": 1.0, "SparQ": 0.4, "LowBit": 0.25}
    lines = [line(label, at, error) for label, error in errors.items() for at in (100, 200)]
    words = " ".join(VIEWS["frontier-findings"](record_of("frontier", "bench.jsonl", lines)).split())
    assert "`rocketkv:ratio=8.0` has 0.50 times the error of `quest` and" in words
    assert "`rocketkv:ratio=8.0` has 1.25 times the error of `sparq`. That agrees in part." in words
    assert words.count("Beside `lowbit`, at equal") == 2
    assert "pariskv" not in words


def test_views_of_choices_read_again() -> None:
    def line(label: str, scanned: float, read: float, recovered: float) -> dict[str, Any]:
        mean = {"scanned": scanned, "bytes_share": read, "mass": 0.9, "recovered": recovered, "relative_error": 0.1}
        shared = {"trace": "t", "budget": 256, "tokens": 900, "last": 4, "sink": 4, "window": 64, "layers": [0, 1]}
        return {**shared, "label": label, "mean": mean}

    kascade = "Kascade(artefact='/a/b.safetensors', anchors={})"
    lines = [
        line("Quest", 50.0, 0.3, 0.8),
        line("Exact(group='softmax')", 800.0, 0.6, 0.9),
        line("FreeKV", 40.0, 0.28, 0.79),
        line("FreeKV(tau=0.5)", 5.0, 0.2, 0.4),
        line("FreeKV(tau=0.8, refresh=True)", 50.0, 0.3, 0.78),
        line(kascade.format(1), 400.0, 0.35, 0.5),
    ]
    record = record_of("reuse", "bench.jsonl", lines)
    record["settings"]["trace.model"] = "m"
    steps = VIEWS["reuse-steps"](record)
    assert "| `quest`, 256 | 100 % | 30.0 % | 0.900 | 0.800 | 10.0 % |" in steps
    assert "| `freekv:tau=0.5`, 256 | 10 % | 20.0 % | 0.900 | 0.400 | 10.0 % |" in steps
    depth = VIEWS["reuse-depth"](record)
    assert "| `kascade:anchors=1`, 256 | 50 % | 35.0 % | 0.900 | 0.500 | 10.0 % |" in depth
    words = " ".join(VIEWS["reuse-findings"](record).split())
    assert "`quest` at 256 rows: `freekv` makes 80 % of the choices, reads 28.0 % of the cache's bytes" in words
    assert "`exact:group=softmax` at 256 rows: none of 1 settings of `kascade` recovers 95 %" in words


def test_views_of_budgets_by_mass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = synthetic(600, heads=1, group=2, size=16, gap=0.3)
    lines = [
        evaluate_budgets(trace, name, ["mass:0.7", "mass:0.9"], last=2)[at].record()
        for name in ("exact", "lowbit:rows=16,group=each", "quest")
        for at in (0, 1)
    ]
    record = record_of("mass", "bench.jsonl", [{**one, "trace.model": "a model"} for one in lines])
    shown = VIEWS["mass-table"](record)
    assert "| `exact`, 0.7 | 0." in shown
    assert "(worst head)" in shown
    said = " ".join(VIEWS["mass-findings"](record).split())
    assert "Asked for 70 %: in the mean `exact`" in said
    assert "The widest gap: `" in said
    record["settings"]["mean.promised"] = 0.5  # of all of them
    record["columns"] = [name if name != "mean.promised" else "other" for name in record["columns"]]
    record["columns"] = [name if name != "mean.mass" else "another" for name in record["columns"]]
    record["settings"]["mean.mass"] = 0.505
    assert "In 6 of 6 cases" in " ".join(VIEWS["mass-calibrated"](record).split())
    pruned = evaluate_budgets(trace, "topp:rows=16", [None], last=2)[0].record()
    record = record_of("topp", "bench.jsonl", [{**pruned, "trace.model": "a model"}])
    assert "| `topp:rows=16` |" in VIEWS["mass-topp"](record)

    from benchmarks import guarantee

    trace.save(tmp_path / "a.safetensors")
    words = ["--selector", "vattention:epsilon=0.5", "--selector", "vattention:epsilon=0.01@64"]
    guarantee.main([str(tmp_path / "a.safetensors"), *words, "--last", "4", "--results", str(tmp_path)])
    capsys.readouterr()
    record = json.loads((tmp_path / "guarantee.json").read_text())
    assert "| `vattention:epsilon=0.01`, 64 rows |" in VIEWS["guarantee-table"](record)
    assert record["steps"] == len(record["layers"]) * 2 * 4
    record["results"] = [{**one, "missed": 0.2} for one in record["results"]]
    said = VIEWS["guarantee-findings"](record)
    assert "in 0 of 1 settings" in said
    assert "at 20.0 % of the steps" in said
    with pytest.raises(SystemExit):
        guarantee.main([str(tmp_path / "a.safetensors"), "--selector", "quest", "--results", str(tmp_path)])


def test_findings_of_tails_are_at_equal_bytes() -> None:
    """A tail with a third of the error at a tenth more bytes pays; what has no pair is in the table alone."""

    def line(label: str, budget: int, share: float, error: float) -> dict[str, Any]:
        mean = {"attended": budget, "bytes_share": share, "relative_error": error, "recovered": 0.5}
        shared = {"tokens": 9, "last": 2, "sink": 4, "window": 5, "layers": [1], "trace.model": "m"}
        return {"trace": "t", "label": label, "budget": budget, "mean": mean, **shared}

    lines = [line("LowBit", at, at / 1000, 0.3 * 100 / at) for at in (100, 200, 400)]
    lines += [line("Tailed(inner=LowBit, rows=64)", at, at / 1000, 0.1 * 100 / at) for at in (100, 200, 400)]
    lines += [line("RetroInfer(zone=1.0)", 100, 0.1, 0.2)]
    record = record_of("tails", "bench.jsonl", lines)
    words = " ".join(VIEWS["tails-findings"](record).split())
    assert "`tailed:inner=lowbit,rows=64` has 0.33 times the error of `lowbit` at equal bytes: the tail pays." in words
    assert "Of the same rows it has 0.33 at 100, 0.33 at 200, 0.33 at 400." in words
    assert "| `retroinfer:zone=1.0` | 100 | 10.0 % | 20.0 % | 50 % |" in VIEWS["tails-errors"](record)


def test_views_of_rows_of_few_bits() -> None:
    """A line for each method and number of bits, beside the same method's rows as they came."""
    line = {"trace": "code", "trace.model": "m", "tokens": 512, "last": 8, "sink": 4, "window": 64, "layers": [0, 1]}
    measured = [
        ("Quest", 64, 0.2, 0.10),
        ("Quest", 256, 0.10, 0.20),
        ("Quest, 4-bit rows", 64, 0.21, 0.06),
        ("Quest, 4-bit rows", 256, 0.12, 0.08),
    ]
    columns = ["label", "budget", "mean.relative_error", "mean.bytes_share"]
    record = {"settings": line, "columns": columns, "records": [list(one) for one in measured]}
    table = VIEWS["rows8-errors"](record)
    assert "| `quest` | 16 | 20.0 % | 10.0 % | 10.0 % | 20.0 % |" in table
    assert "| `quest` | 4 | 21.0 % | 6.0 % | 12.0 % | 8.0 % |" in table
    found = " ".join(VIEWS["rows8-findings"](record).split())
    assert "`m`, `quest` at 256 rows: 4-bit rows have 1.20 times the error of 16-bit ones and read 0.40 times" in found
    shared = {"model": "m", "length": 512, "scored_tokens": 16, "sink": 4, "window": 64, "kind": "novel", "text": "a"}
    columns = ["method", "budget", "kl", "same_top", "nll", "nll_difference", "bytes_share"]
    lines = [["full", None, 0.0, 1.0, 1.5, 0.0, 1.0], ["Quest, 8-bit rows", "64", 0.25, 0.75, 1.6, 0.1, 0.05]]
    table = VIEWS["rows8-agreement"]({"settings": shared, "columns": columns, "records": lines})
    assert "| `quest`, 64 | 8 | 0.2500 | 75 % | +0.1000 | 5.0 % |" in table
