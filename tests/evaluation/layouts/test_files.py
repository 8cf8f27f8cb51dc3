"""Files as benchmarks publish them: JSON Lines, JSON, parquet, folders; and what is wrong with one, by its line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sparseattn.evaluation.layouts.files import lines
from tests.evaluation.layouts.lines import KVPRESS, LONGBENCH, LONGBENCH_TEMPLATES, read, write

pyarrow = pytest.importorskip("pyarrow")
ROWS = [{**KVPRESS, "answer": [f"a{i}", "b"], "max_new_tokens": 5 + i} for i in range(3)]


def held(path: Path) -> list[dict[str, Any]]:
    return [dict(line.fields) for line in lines(path)]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def saved(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A folder as `datasets` saves one."""
    table = pyarrow.Table.from_pylist(rows)
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text('{"features": {}}')
    (folder / "state.json").write_text('{"_data_files": []}')
    return folder


def test_all_kinds_hold_the_same_lines(tmp_path: Path) -> None:
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps(ROWS, indent=1))
    under = tmp_path / "under.json"
    under.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))
    two = tmp_path / "two"
    write(two / "1.jsonl", *ROWS[:2])
    parquet(two / "2.parquet", ROWS[2:])
    (two / "README.md").write_text("not read")
    for path in (
        write(tmp_path / "l.jsonl", *ROWS),
        write(tmp_path / "l.json", *ROWS),
        whole,
        under,
        parquet(tmp_path / "t.parquet", ROWS),
        saved(tmp_path / "saved" / "test", ROWS),
        tmp_path / "saved",
        two,
    ):
        assert held(path) == ROWS, path
        assert [example.limit for example in read(path).examples] == [5, 6, 7]


def test_places_are_those_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "two" / "1.jsonl", *ROWS)
    parquet(tmp_path / "two" / "2.parquet", [*ROWS, {**KVPRESS, "answer": ["", "b"]}])
    with pytest.raises(ValueError, match=r"two/2.parquet, line 4: answers are .* none of them empty, got \['', 'b'\]"):
        read(tmp_path / "two")


def test_a_truncated_file_is_a_sentence_with_the_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "l.jsonl", *ROWS).read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole[:-40])
    with pytest.raises(ValueError, match=r"cut.jsonl, line 3: it is not JSON .*; the file ends within this line"):
        read(cut)
    table = parquet(tmp_path / "t.parquet", ROWS).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(table[: len(table) // 2])
    with pytest.raises(ValueError, match=r"cut.parquet is cut off, or no parquet file: "):
        read(tmp_path / "cut.parquet")
    arrow = next(saved(tmp_path / "saved", ROWS).glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"arrow is cut off, or no arrow file: "):
        read(tmp_path / "saved")
    half = tmp_path / "half.json"
    half.write_text(json.dumps(ROWS)[:-9])
    with pytest.raises(ValueError, match=r"half.json: it is not JSON at "):
        read(half)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("a.json", "[1]", "a.json, line 1: a line is a JSON object, got int"),
        ("a.json", '{\n"rows": []}', "a.json is JSON: a list of objects, or an object with such a list under data"),
        ("a.jsonl", "", "a.jsonl holds no prompt"),
        ("a.json", "[]", "a.json holds no prompt"),
    ],
)
def test_files_without_lines(name: str, words: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(words)
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / name)


def test_an_empty_folder_and_no_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"is a folder without files that end with \.parquet, \.arrow, \.jsonl, \.json$"
    ):
        read(tmp_path)
    table = parquet(tmp_path / "t.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"tables need pyarrow: pip install 'sparseattn\[datasets\]'"):
        read(table)


def test_empty_columns_of_a_table_are_no_fields(tmp_path: Path) -> None:
    """In a table all rows have all columns: a null is a field that is not there."""
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(LONGBENCH_TEMPLATES))
    rows = [{**LONGBENCH, "options": None, "choice_A": ""}, {**LONGBENCH, "options": []}]
    assert len(read(parquet(tmp_path / "t.parquet", rows)).examples) == 2


def test_json_in_a_folder_is_read_where_it_holds_prompts(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "1.json", ROWS[0])  # JSON Lines
    (folder / "2.json").write_text(json.dumps(ROWS[1:2]))
    (folder / "3.json").write_text(json.dumps({"data": ROWS[2:]}))
    (folder / "dataset2prompt.json").write_text(json.dumps(LONGBENCH_TEMPLATES, indent=1))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    (folder / "words.json").write_text('["a"]')
    (folder / "empty.json").write_text("")
    assert held(folder) == ROWS
    names = ["dataset2prompt.json", "dataset_info.json", "empty.json", "words.json"]
    assert [path.name for path in read(folder).skipped] == names
    (folder / "4.json").write_text(json.dumps(ROWS)[:-9])
    with pytest.raises(ValueError, match=r"4.json: it is not JSON at "):
        read(folder)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"without files that end with .*, and .*info.json holds no prompt"):
        read(alone)


def test_an_object_of_data_may_stand_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}))
    assert held(path) == ROWS
    path.write_text("7")
    with pytest.raises(ValueError, match=r"one.json: a line is a JSON object, got int"):
        read(path)


@pytest.mark.parametrize("name", ["l.jsonl", "l.json"])
def test_a_mark_of_utf8_at_the_beginning_is_no_text(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, *ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert held(path) == ROWS


def test_a_file_is_cut_off_only_where_its_last_line_would_go_on(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    for words in ('{"a": 1}\r{"b": 2}', '{"a": 1} x', "{a: 1}", "[1]"):
        path.write_bytes(words.encode())
        with pytest.raises(ValueError, match=r"l\.jsonl, line 1: ") as raised:
            read(path)
        assert "ends within" not in str(raised.value), words
    for words in ('{"a": "x', '{"a": [1, ', '{"a"'):
        path.write_text(words)
        with pytest.raises(ValueError, match="the file ends within this line"):
            read(path)
