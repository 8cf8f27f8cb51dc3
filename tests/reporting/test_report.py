"""`sparseattn report`: what its page holds, what it refuses, and the rows that its explorer shows."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
import torch
from typer.testing import CliRunner, Result

from sparseattn.cli import report_defaults
from sparseattn.cli.app import app
from sparseattn.cli.report_options import EXPLORED, Explored, ReportOptions
from sparseattn.evaluation import token_explorer
from sparseattn.evaluation.attention_stats import rows_holding
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.token_explorer import DECADES, explore, level, packed, tokens_of
from sparseattn.models.load import pieces
from sparseattn.reporting import line_style
from sparseattn.reporting.html import html
from sparseattn.reporting.html.kinds import KINDS
from sparseattn.reporting.html.percentages import percent, typeset
from sparseattn.reporting.html.starting_methods import starting_methods
from sparseattn.reporting.html.views import Explorer, Lines, Section, axis, cost
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors.baselines.window import Window
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceError
from tests import report_records as records
from tests.cases import Buckets

LIMIT = 5_000_000  # bytes of a page


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass
class Shown:
    """A figure of the page.

    Args:
        kind: of its view.
        data: what its script draws; empty for tables and facts.
        cells: texts of a table's rows.
        groups: of facts, name -> text.
    """

    kind: str
    data: dict[str, Any]
    cells: list[list[str]]
    groups: dict[str, dict[str, str]]


def text_of(element: Element) -> str:
    return "".join(element.itertext()).strip()


def sections_of(page: str) -> dict[str, tuple[list[str], list[Shown]]]:
    """What the page's markup says, by section: its findings and its figures; the browser is not asked."""
    (markup,) = re.findall(r"<main.*?</main>", page, re.S)
    main = ElementTree.fromstring(markup)
    figures = data_of(page)["figures"]
    lead = {text_of(one.find("a")): text_of(one.find("span")) for one in main.findall("section[@class='lead']/p")}
    found = {}
    for section in main.findall("section[@id]"):
        title = text_of(section.find("h2"))
        said = [lead[title]] if title in lead else []
        said += [text_of(one) for one in section.findall("ul/li") + section.findall("details/ul/li")]
        shown = [
            Shown(
                figure.attrib["data-kind"],
                figures.get(figure.attrib["id"], {}),
                [[text_of(cell) for cell in row] for row in figure.findall(".//tbody/tr")],
                {
                    text_of(group.find("summary")): {
                        text_of(one[0]): text_of(one[1]) for one in group.findall("dl/div")
                    }
                    for group in figure.findall("details")
                },
            )
            for figure in section.findall("figure")
        ]
        found[section.attrib["id"]] = said, shown
    return found


@pytest.fixture(scope="module")
def folders(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return once("report-records", records.fill)


@pytest.fixture(scope="module")
def page(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of every kind of record, and a trace explored."""
    folder = tmp_path_factory.mktemp("page")
    records.trace().save(folder / "tale.safetensors")
    asked: list[str | Path] = ["--trace", folder / "tale.safetensors", "--queries", "4", "--budget", "16"]
    asked += ["--window", "8", "--sink", "2"]
    for method in EXPLORED:
        asked += ["--selector", method]
    names = ("bench", "inspect", "recall", "eval", "recommend")
    done = run("report", *(folders / name for name in names), *asked, "--out", folder / "r.html")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[-1] == f"report: {folder / 'r.html'}"
    return (folder / "r.html").read_text()


def test_the_page_holds_every_kind_of_record_and_its_findings(page: str) -> None:
    sections = sections_of(page)
    assert list(sections) == ["plan", "frontier", "layers", "needs", "recall", "answers", "explorer", "origin"]
    assert set(KINDS) == {
        "recommend.jsonl",
        "bench.jsonl",
        "by-layer.jsonl",
        "inspect.jsonl",
        "recall.jsonl",
        "eval.jsonl",
    }
    assert all(said for name, (said, _) in sections.items() if name != "origin")
    views = {name: [view.kind for view in shown] for name, (_, shown) in sections.items()}
    assert views["frontier"] == ["lines", "heat", "table"]
    assert views["needs"] == ["heat"]
    assert "<h1>made up, up to 4,096 tokens: 4 methods on tale, passkey, alice</h1>" in page
    assert views["plan"] == ["lines", "given", "heat", "table"]
    said, (lines, given, heat, table) = sections["plan"]
    assert [(one["method"], one["at"], one["values"]["kl"]) for one in lines.data["points"]] == [
        ("quest", "budget 16", 1.5 / 16),
        ("quest", "budget 64", pytest.approx(1.5 / 64, abs=1e-6)),
    ], "what is measured in every layer"
    assert heat.data["panels"][0]["values"]["kl"] == [[0.09375, 0.09375], [0.0625, None]]
    (plan,) = given.data["plans"]
    assert plan["layers"][1] == {
        "layer": 1,
        "agree": False,
        "heads": [{"method": "quest", "budget": "64"}, {"method": "dense", "budget": ""}],
    }
    assert plan["layers"][0] == {"layer": 0, "agree": True, "heads": [{"method": "window", "budget": ""}] * 2}
    assert table.cells[1:] == [
        ["made up-1%", "1", "KV head 0", "quest", "64"],
        ["made up-1%", "1", "KV head 1", "dense", "\u2013"],
    ]
    assert said[0].startswith("The plan made up-1% reads 25\u00a0% of full attention's bytes. On 3 held-out windows")
    (dot,) = lines.data["marked"]
    layers = [
        (0.02, 0.05, 0.4),
        ((64 / 500 + 1) / 2, 0.5 / 64, (0.1 + 0) / 2),
    ]  # window; Quest at 64 and dense
    means = [sum(values) / 2 for values in zip(*layers, strict=True)]
    assert [dot["values"][name] for name in ("bytes_heads", "kl", "error_heads")] == pytest.approx(means, rel=1e-4)
    assert dot["beside"]["kl"]["method"] == "quest"
    assert 16 / 500 < dot["beside"]["kl"]["value"] < 64 / 500, "between two budgets of the best single method"
    assert views["answers"] == ["lines", "table", "lines", "heat", "table"]
    (needles,) = (view for view in sections["answers"][1] if view.kind == "heat")
    lost = [one for one in needles.data["panels"] if one["method"] == "quest" and one["choice"]["budget"] == "64"]
    assert [(one["rows"], one["columns"], one["values"]["score"]) for one in lost] == [
        ([0, 0.5, 1], [1024, 4096], [[0, 0], [1, 1], [1, 1]])
    ]
    assert [one["name"] for one in data_of(page)["methods"]] == ["quest", "exact", "window", "lowbit"]


def test_the_page_holds_every_setting_and_version(page: str, folders: Path) -> None:
    _, (view,) = sections_of(page)["origin"]
    groups = view.groups
    bench = groups[str(folders / "bench" / "bench.jsonl")]
    line = json.loads((folders / "bench" / "bench.jsonl").read_text().splitlines()[0])
    for name in ("sink", "window", "last", "tokens", "seal", "device", "trace_dtype", "replay_dtype", "selector"):
        assert str(line[name]) in bench[name], name
    assert bench["budget"] == "16; 64"
    assert groups["trace tale"] == {"model": "made up", "text name": "tale.txt"}
    assert groups[str(folders / "eval" / "eval.jsonl")]["model"] == "made up"
    recommended = groups[str(folders / "recommend" / "recommend.jsonl")]
    assert (recommended["window"], recommended["held_out"], recommended["date"]) == ("64", "3", "2026-11-23")
    assert not {"source", "number", "points"} & set(recommended)
    (made_by,) = (facts for name, facts in groups.items() if name.startswith("versions and machine of"))
    assert (made_by["sparseattn"], made_by["cores"]) == ("0.1.0", "2")
    explored = groups["the attention of tale"]
    assert explored["selectors"].startswith("quest:page=16,group=sum,int8=False, lowbit:bits=2,")
    assert explored["versions torch"] == torch.__version__


def test_the_page_needs_nothing_but_itself(page: str) -> None:
    """No address that a browser would fetch; of others' scripts only what names a format or an author."""
    assert len(page.encode()) < LIMIT
    assert (
        re.findall(r"""(?:src|href)=["']?(?!data:,)[^#"'\s>]+""", re.sub(r"<script.*?</script>", "", page, flags=re.S))
        == []
    )
    own = [html.asset(name) for name in html.SCRIPTS if not name.startswith("vendor")]
    assert not any(re.search(r"https?:|\bfetch\(|XMLHttpRequest|\bimport\b", text) for text in own)
    assert "default-src 'none'" in page
    found = set(re.findall(r"https?://[\w./]+", page))
    assert {one.split("/")[2] for one in found} <= {"www.w3.org", "d3js.org"}
    assert "THE SOFTWARE IS PROVIDED" in page, "the licences of what it holds"


def test_the_scripts_of_others_are_those_that_are_stated() -> None:
    stated = dict(re.findall(r"^\| `(\S+)` \|.* `([0-9a-f]{64})` \|$", html.asset("vendor/README.md"), re.M))
    assert stated
    for name in (one for one in html.SCRIPTS if one.startswith("vendor/")):
        assert hashlib.sha256(html.asset(name).encode()).hexdigest() == stated[name.removeprefix("vendor/")]


def test_names_from_records_are_text_and_no_markup(tmp_path: Path, folders: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    line = json.loads((folders / "bench" / "bench.jsonl").read_text().splitlines()[0])
    near = {**line["mean"], "relative_error": 0.05}  # so that the finding names it
    records.write(tmp_path / "bench.jsonl", [{**line, "mean": near, "trace": evil, "label": "<b>&"}])
    assert run("report", tmp_path, "--out", tmp_path / "r.html", "--title", "<i>").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert "alert(1)</script>" not in page
    assert "<h1>&lt;i&gt;</h1>" in page
    said, shown = sections_of(page)["frontier"]
    assert evil in said[0]
    assert shown[0].data["points"][0]["facet"] == evil
    assert shown[-1].cells[0][:2] == [evil, "<b>&"]


def test_two_folders_of_one_kind_are_two_sections(tmp_path: Path, folders: Path) -> None:
    for name in ("a", "b"):
        records.write(tmp_path / name / "eval.jsonl", records.answers())
    assert run("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "r.html").exit_code == 0
    page = (tmp_path / "r.html").read_text()
    assert list(sections_of(page)) == ["answers-1", "answers-2", "origin"]
    assert f"{tmp_path / 'b'}</h2>" in page
    assert len(set(re.findall(r'id="([^"]+)"', page))) == len(re.findall(r'id="([^"]+)"', page)), "names are unique"


@pytest.mark.parametrize(
    ("lines_of", "said"),
    [
        (None, f"holds no records: none of {', '.join(KINDS)} is there"),
        ("", "bench.jsonl is empty"),
        (
            '\n{"tra',
            "bench.jsonl, line 2 is no JSON that can be read: it is not JSON at column 2: Unterminated string",
        ),
        ("[1]\n", "bench.jsonl, line 1 is no record but [1]"),
        (
            '{"trace": "t", "label": "quest"}\n',
            "bench.jsonl, line 1 is no record that this command can read: budget is missing",
        ),
    ],
    ids=["nothing", "empty", "cut off", "no object", "lacking"],
)
def test_folders_without_records_are_refused(lines_of: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    if lines_of is not None:
        (tmp_path / "out" / "bench.jsonl").write_text(lines_of)
    done = run("report", tmp_path / "out", "--out", tmp_path / "r.html")
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "r.html").exists()


def test_a_run_that_has_not_finished_is_said(tmp_path: Path) -> None:
    (tmp_path / "bench.partial.jsonl").write_text("{}\n{}\n")
    done = run("report", tmp_path, "--out", tmp_path / "r.html")
    assert done.exit_code == 2
    said = "bench.jsonl has not finished: bench.partial.jsonl holds 2 records. Let it finish, or run the same command"
    assert said in " ".join(done.stderr.split())


def test_the_explorer_follows_the_bench_folder_beside_it() -> None:
    def record(label: str, budget: int, trace: str = "prose") -> dict[str, Any]:
        return {"trace": trace, "label": label, "budget": budget, "sink": 2, "window": 8}

    labels = ("mine:Ball", "quest:page=8", "window", "tailed:inner=[mine:Ball]", "mean", "roles of a file", "lowbit")
    records = [record(label, budget) for label in labels for budget in (32, 64, 128)]
    records += [record("exact", 512, "code")]
    shown, left_out = report_defaults.explored(ReportOptions(trace=["prose"]), records)
    assert (list(shown.selectors), shown.budget, shown.sink, shown.window) == (
        ["quest:page=8", "mean", "lowbit"],
        64,
        2,
        8,
    )
    assert left_out == ["mine:Ball", "tailed:inner=[mine:Ball]"]
    given = ReportOptions(trace=["prose"], selector=["mine:Ball"], budget="5%", sink=0, window=1)
    shown, left_out = report_defaults.explored(given, records)
    assert (list(shown.selectors), shown.budget, shown.sink, shown.window) == (["mine:Ball"], 0.05, 0, 1)
    assert not left_out
    shown, _ = report_defaults.explored(ReportOptions(trace=["other.safetensors"]), [])
    assert shown == Explored(["other.safetensors"])


def test_a_page_of_many_methods_opens_with_a_few() -> None:
    """Those that an explorer shows, then those that no other beats most often; controls come last."""
    labels = ["A", "B", Window().label(), "C", "D", "E", "F"]
    points = [
        {"method": label, "facet": "t", "at": "", "values": {"bytes_share": 0.1 + i / 100, "relative_error": error}}
        for i, (label, error) in enumerate(zip(labels, (0.9, 0.95, 0.8, 0.85, 0.7, 0.6, 0.5), strict=True))
    ]
    lines = Lines("", "trace", [cost("bytes_share")], [axis("relative_error")], points)
    shown = Section("s", "", [], [Explorer("", {"methods": [{"label": "C"}]}), lines])
    assert starting_methods(labels, [shown]) == ["A", "C", "D", "E", "F"]
    assert starting_methods(labels[:3], [shown]) == labels[:3]


def test_percentages_are_written_in_one_way() -> None:
    assert [percent(share) for share in (0, 0.0861, 0.521, 1, math.nan)] == [
        *("0\u00a0%", "8.61\u00a0%", "52.1\u00a0%", "100\u00a0%"),
        "\u2013",
    ]
    said = "Quest at budget 5% reads 19% to 20.5 % of it, 1% off; the plan smollm2-0.3% more."
    assert typeset(said) == (
        "Quest at budget 5% reads 19\u00a0% to 20.5\u00a0% of it, 1\u00a0% off; the plan smollm2-0.3% more."
    )


def test_what_cannot_be_asked_is_refused(tmp_path: Path, folders: Path) -> None:
    bench, pipe = folders / "bench", tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for arguments, said in (
        ((), "name a folder that bench, inspect, recall, eval or recommend wrote, or a --trace to explore"),
        ((tmp_path / "none",), f"there is no folder {tmp_path / 'none'}"),
        ((bench / "bench.jsonl",), f"bench.jsonl is a file; name the folder that a command wrote, such as {bench}"),
        ((bench, bench), "is named twice"),
        ((bench, "--out", tmp_path / "r.txt"), "--out must be an .html file"),
        ((bench, "--out", tmp_path / "none" / "r.html"), "the folder of --out does not exist"),
        ((bench, "--selector", "quest"), "--selector needs a --trace, on which it is shown"),
        ((bench, "--trace", "nowhere"), "nowhere is neither a file nor a built-in trace"),
        ((bench, "--trace", pipe), "is a pipe, not a trace file, which is read in any order"),
    ):
        done = run("report", *arguments)
        assert done.exit_code == 2, arguments
        assert said in " ".join(done.stderr.split()), arguments


def share(levels: torch.Tensor) -> torch.Tensor:
    return torch.where(levels > 0, 10 ** (DECADES * (levels.double() / 255 - 1)), 0.0)


def unpacked(rows: torch.Tensor, count: int) -> torch.Tensor:
    return ((rows[..., None] >> torch.arange(8)) & 1).flatten(-2)[..., :count].bool()


@pytest.mark.parametrize("method", ["quest", "buckets", "roles"])
def test_the_explorer_shows_the_rows_that_evaluate_measured(method: str) -> None:
    """Weights are those of attention over the trace; those of the rows read add up to the mass, their number to the
    rows attended: where the cache reorders rows too, and where the KV heads of a layer have different methods."""
    trace = records.trace()
    mixed = Roles({0: ["window", Role("quest", 32)], 1: "quest"}, name="mixed")
    asked = {"quest": "quest", "buckets": Buckets(), "roles": mixed}[method]
    settings: dict[str, Any] = {"sink": 2, "window": 8}
    found = explore(trace, [asked], 64, queries=3, **settings)
    (reading,) = found.readings
    again = {"quest": "quest", "buckets": Buckets(), "roles": mixed}[method]
    measured = evaluate(trace, again, 64, last=3, steps=("mass", "attended", "relative_error"), **settings)
    assert found.tokens == (317, 318, 319)
    assert found.levels.shape == (3, 2, 4, trace.tokens)
    assert reading.page == (16 if method == "quest" else 1)
    rows, weights = unpacked(reading.rows, trace.tokens), torch.zeros(3, 2, 4, trace.tokens, dtype=torch.float64)
    for i, layer in enumerate(map(trace.layer, trace.layers)):
        for t, token in enumerate(found.tokens):
            logits = layer.query[:, :, token].double() @ layer.keys[:, : token + 1].double().mT * layer.scale
            weights[t, i, :, : token + 1] = logits.softmax(-1).flatten(0, 1)
    torch.testing.assert_close(share(found.levels), weights, rtol=0.03, atol=1e-5)
    for name, ours in (("mass", (weights * rows).sum(-1)), ("attended", rows.sum(-1))):
        theirs = measured.steps[name].movedim(-1, 0).double()
        torch.testing.assert_close(
            ours.double(), theirs, rtol=0.03, atol=0.005, msg=lambda said, n=name: f"{n}: {said}"
        )
        torch.testing.assert_close(reading.measured[name], theirs)
    for t, token in enumerate(found.tokens):
        assert not found.levels[t, ..., token + 1 :].any(), "what comes after a token"
        assert rows[t, ..., [0, 1, token]].all(), "sink and window"


def test_rows_of_a_cache_are_found_in_the_trace() -> None:
    rows = torch.randn(2, 50, 8)
    order = torch.stack([torch.randperm(50), torch.randperm(50)])
    stored = rows.gather(1, order[..., None].expand_as(rows))
    found = tokens_of(stored, rows)
    assert found is not None
    assert torch.equal(found, order)
    assert tokens_of(rows, rows) is None
    with pytest.raises(ValueError, match="other rows than the trace"):
        tokens_of(stored + 1, rows)


def test_levels_and_bits() -> None:
    shares = torch.logspace(-4.9, 0, 99, dtype=torch.float64)
    torch.testing.assert_close(share(level(shares)), shares, rtol=0.03, atol=0)
    assert level(torch.tensor([0.0, 1e-7, 1.0])).tolist() == [0, 0, 255]
    bits = torch.rand(3, 21) < 0.5
    assert torch.equal(unpacked(packed(bits), 21), bits)


def test_the_fewest_rows_that_hold_a_share() -> None:
    weights = torch.tensor([[0.5, 0.1, 0.3, 0.1], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert rows_holding(weights, 0.9).tolist() == [3, 1, 0]


def test_the_explorer_refuses_what_it_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = records.trace()
    with pytest.raises(ValueError, match="of different labels, got"):
        explore(trace, ["quest", "quest"], 16)
    monkeypatch.setattr(token_explorer, "MOST", 1 << 12)
    with pytest.raises(ValueError, match=r"8 tokens, 2 layers and 4 heads of 320 rows are .* name fewer layers or tok"):
        explore(trace, ["quest"], 16)


def test_what_the_page_holds_of_a_trace_is_what_was_explored(page: str) -> None:
    data = sections_of(page)["explorer"][1][0].data["data"]
    found = explore(records.trace(), ["quest", "lowbit", "exact"], 16, queries=4, sink=2, window=8)
    assert zlib.decompress(base64.b64decode(data["levels"])) == found.levels.numpy().tobytes()
    for one, reading in zip(data["methods"], found.readings, strict=True):
        assert zlib.decompress(base64.b64decode(one["rows"])) == reading.rows.numpy().tobytes()
    assert "".join(data["pieces"]).startswith("the café read\n")
    start = data["start"]
    errors = [reading.measured["relative_error"].mean() for reading in found.readings]
    assert start["method"] == errors.index(max(errors))


def test_a_trace_may_hold_its_text(tmp_path: Path) -> None:
    trace = records.trace()
    assert trace.pieces is not None
    trace.save(tmp_path / "t.safetensors")
    again = Trace.open(tmp_path / "t.safetensors")
    assert again.pieces == trace.pieces
    assert again.first(10).pieces == trace.pieces[:10]
    synthetic(64, heads=1, group=1, size=16).save(tmp_path / "bare.safetensors")
    assert Trace.open(tmp_path / "bare.safetensors").pieces is None
    with pytest.raises(TraceError, match="a trace of 320 tokens has as many pieces of text, got 1"):
        Trace.build([trace.layer(0)], trace.positions, pieces=["one"])
    held = (tmp_path / "t.safetensors").read_bytes()
    (tmp_path / "t.safetensors").write_bytes(held.replace(b'[\\"the \\"', b"[       7", 1))
    with pytest.raises(TraceError, match="is a damaged trace: a trace's pieces are texts"):
        Trace.open(tmp_path / "t.safetensors")


def test_pieces_are_the_text_again() -> None:
    text = "café ☕\n"
    found = pieces(None, text.encode())
    assert len(found) == len(text.encode())
    assert "".join(found) == text

    class Offsets:
        """Of byte-level BPE: ☕ takes two tokens, both said to stand for all of it; the first token is of no text."""

        is_fast = True

        def __call__(self, text: str, **more: bool) -> dict[str, Any]:
            spans = [(0, 0), (0, 4), (5, 6), (5, 6), (6, 7)]  # a tokenizer may leave out the space before a word
            return {"input_ids": list(range(5)), "offset_mapping": spans}

    assert pieces(Offsets(), text.encode()) == ["", "café", " ☕", "", "\n"]


@pytest.mark.parametrize("colours", [line_style.COLOURS, line_style.DARK], ids=["light", "dark"])
def test_colours_stay_apart_for_eyes_of_every_kind(colours: tuple[str, ...]) -> None:
    """CIELAB's distance of any two, as seen without red, green or blue cones (Machado 2009, table 1)."""
    seen = {
        "all cones": torch.eye(3),
        "no red": torch.tensor([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
        "no green": torch.tensor([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
        "no blue": torch.tensor([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
    }
    coded = torch.tensor([[int(one[i : i + 2], 16) / 255 for i in (1, 3, 5)] for one in colours])
    linear = torch.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for who, cones in seen.items():
        xyz = (linear @ cones.T).clamp(0, 1) @ to_xyz.T / torch.tensor([0.95047, 1.0, 1.08883])
        root = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
        lab = torch.stack([116 * root[:, 1] - 16, 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], 1)
        for i, k in combinations(range(len(colours)), 2):
            assert (lab[i] - lab[k]).norm() > 16, (who, colours[i], colours[k])
