"""The table of measures knows every number of the records, and a `Table` writes the same cells in every rendering."""

from __future__ import annotations

import io
import math
from xml.etree import ElementTree

import pytest

from sparseattn.evaluation import attention_stats, recall_curve, step_measures
from sparseattn.evaluation.measure_table import COUNT, PERCENT, SIGNIFICANT, Format, measure, measures
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import Screen

EVIL = "</td><script>alert(1)</script>"


@pytest.mark.parametrize("keys", [step_measures.MEASURES, attention_stats.MEASURES, recall_curve.MEASURES])
def test_every_number_of_a_record_is_in_the_table(keys: tuple[str, ...]) -> None:
    for known in measures(keys):
        assert known.short
        assert known.label
        assert "{" not in known.head + known.words
    assert len({known.words for known in measures(keys)}) == len(keys), "each says something of its own"
    assert [known.key for known in measures(keys)] == list(keys)


def test_a_measure_of_a_number_names_it() -> None:
    recall = measure("recall@10")
    assert (recall.key, recall.head, recall.label) == ("recall@10", "R@10", "recall of the 10 best rows")
    with pytest.raises(KeyError):
        measure("speed")


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (PERCENT, 0.1234, "12.3"),
        (COUNT, 12345.6, "12,346"),
        (SIGNIFICANT, 0.0012345, "0.00123"),
        (Format(1, 100, signed=True), 0.05, "+5.0"),
        (PERCENT, None, "-"),
        (PERCENT, math.nan, "-"),
    ],
)
def test_formats(form: Format, value: float | None, text: str) -> None:
    assert form(value) == text


@pytest.fixture
def table() -> Table:
    made = Table(f"title {EVIL}", [Column.text("method"), Column.of("bytes_share"), Column("budget")], row_head=0)
    made.add(EVIL, 0.125, "64")
    made.add("a|b", math.nan, None)
    return made


def test_a_table_in_markdown(table: Table) -> None:
    head, marks, first, second = table.markdown().splitlines()
    assert head == "| method | bytes % | budget |"
    assert marks == "| --- | ---: | ---: |"
    assert first == f"| {EVIL} | 12.5 | 64 |"
    assert second == r"| a\|b | - | - |"


def test_a_table_in_html_is_escaped_and_has_numbers_to_sort_by(table: Table) -> None:
    text = table.html()
    assert "<script" not in text
    rows = ElementTree.fromstring(text).findall("tbody/tr")
    assert [[cell.text for cell in row] for row in rows] == [[EVIL, "12.5", "64"], ["a|b", "-", "-"]]
    assert [cell.tag for cell in rows[0]] == ["th", "td", "td"]
    assert rows[0][1].attrib == {"class": "number", "data-value": "0.125"}
    assert "data-missing" in rows[1][1].attrib


def test_a_table_on_a_terminal_is_no_command_to_it() -> None:
    made = Table("[red]title\x1b[31m", [Column.text("a \x1b[31m and more words")])
    made.add("[bold]x\x1b[2J")
    made.rule()
    made.add("last")
    screen = Screen(width=80)
    screen.file = io.StringIO()
    screen.print(made)
    shown = screen.file.getvalue()
    assert "[red]title[31m" in shown
    assert "[bold]x[2J" in shown
    assert "\x1b[31m" not in shown
    assert "\x1b[2J" not in shown
