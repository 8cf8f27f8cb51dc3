"""The code in the documents runs, in order, each document in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_code_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.S | re.M)
    assert blocks, f"{name} shows code"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    if name == "CONTRIBUTING.md":
        _obeys_the_main_laws(names["MeanPage"])


def _obeys_the_main_laws(method) -> None:
    from cases import Case
    from test_laws import (
        test_exhaustive_and_unlimited_is_full_attention,
        test_output_is_attention_over_exactly_the_rows_named,
    )

    case = Case("documented", method, method)
    for apart in (None, "cpu"):
        test_exhaustive_and_unlimited_is_full_attention(case, apart)
        test_output_is_attention_over_exactly_the_rows_named(case, (4, 8, 32), apart)


def test_local_links_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
