"""The code in the documents runs, in order, each document in one namespace; command lines parse; links lead somewhere.

Above a block that cannot run here stands `<!-- not run: needs ... -->` with the reason; it is still compiled. One below
`<!-- with smollm2 -->` runs in a namespace of its own where that model is cached. A text block below `<!-- prints -->`
is what the Python block before it prints, to the letter.
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from scripts.house import first_pages
from tests import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n+)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.S | re.M)
LANGUAGES = ("python", "bash", "text")
REASONS = ("needs a CUDA device", "needs a model of yours", "needs files of yours", "needs a server")
OTHERS = ("pip", "export", "git", "seq", "curl")  # commands that are not ours to check


@dataclass(frozen=True)
class Block:
    """A fenced block: the comment above it, its language and its text."""

    mark: str
    language: str
    text: str

    @property
    def model(self) -> str:
        """The packaged model that it needs, or nothing."""
        return self.mark.removeprefix("with ") if self.mark.startswith("with ") else ""

    @property
    def runs(self) -> bool:
        return not self.mark.startswith("not run") and not self.model


def blocks(path: Path) -> list[Block]:
    return [Block(found["mark"] or "", found["language"], found["text"]) for found in FENCE.finditer(path.read_text())]


def named(language: str) -> pytest.MarkDecorator:
    """Parametrizes `path` by the documents that have blocks of the language."""
    some = [path for path in DOCUMENTS if any(block.language == language for block in blocks(path))]
    assert some, f"no document has a block of {language}"
    return pytest.mark.parametrize("path", some, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_of_a_kind_that_is_checked(path: Path) -> None:
    text, found = path.read_text(), blocks(path)
    assert len(re.findall("^ *```", text, re.M)) == 2 * len(found), "a fence is not closed, or is indented"
    for number, block in enumerate(found):
        assert block.language in LANGUAGES, f"block {number} is of {block.language!r}, known are {LANGUAGES}"
        if not block.runs and not block.model:
            assert block.mark.removeprefix("not run: ") in REASONS, f"no known reason: {block.mark!r}"
        if block.mark == "prints":
            assert number, "nothing comes before what is printed"
            before = found[number - 1]
            assert before.language == "python"
            assert before.runs or before.model


@named("python")
def test_code_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    printed: str | None = ""
    for block in blocks(path):
        if block.language == "python":
            compile(block.text, path.name, "exec")
            printed = _run(path, block, names) if block.runs else None
        elif block.mark == "prints" and printed is not None:
            assert printed == block.text, f"{path.name} shows other output than its code prints"
    for name in ("MeanPage", "MeanKey", "SignMatch"):
        if name in names:
            _obeys_the_main_laws(names[name])


def _run(path: Path, block: Block, names: dict[str, object]) -> str:
    """What it prints."""
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(block.text, path.name, "exec"), names)
    return out.getvalue()


# Blocks that need a packaged model.
WITH_MODELS = [path for path in DOCUMENTS if any(block.model for block in blocks(path))]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_MODELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run_with_the_model_that_they_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseattn.models.packaged import PACKAGED

    monkeypatch.chdir(tmp_path)
    found = blocks(path)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.model:
            if not PACKAGED[block.model].cached:
                pytest.skip(f"{block.model} is not cached: `sparseattn models --fetch {block.model}` brings it")
            printed = _run(path, block, {"__name__": path.stem})
            if following is not None and following.mark == "prints":
                assert printed == following.text, f"{path.name} shows other output than its code prints"


def _obeys_the_main_laws(method) -> None:
    from tests.cases import Case
    from tests.selectors.test_laws import (
        test_exhaustive_and_unlimited_is_full_attention,
        test_output_is_attention_over_exactly_the_rows_named,
    )

    case = Case("documented", method, method)
    for apart in (None, "cpu"):
        test_exhaustive_and_unlimited_is_full_attention(case, apart)
        test_output_is_attention_over_exactly_the_rows_named(case, (4, 8, 32), apart)


def test_the_selectors_that_documents_show_are_tested_against_the_laws() -> None:
    shown = {
        "README.md": "MeanKey(PageSelector)",
        "CONTRIBUTING.md": "MeanPage(Selector)",
        "docs/write/selector.md": "SignMatch(Selector)",
    }
    for name, method in shown.items():
        assert f"class {method}" in (ROOT / name).read_text()


def commands(text: str) -> list[list[str]]:
    """The command lines of a block: continued lines joined, comments and variables left out, `$(...)` as one word."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    words = [shlex.split(re.sub(r"\$\([^)]*\)", "0", line), comments=True) for line in lines]
    return [one for one in words if one]


@named("bash")
def test_commands_parse(path: Path) -> None:
    for block in blocks(path):
        if block.language == "bash":
            for words in commands(block.text):
                check(words)


def check(words: list[str]) -> None:
    """Subcommands, options, modules and targets that a command line names exist, and values are of their types."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if re.fullmatch(r"\.venv-vllm[-.0-9]*/bin/python", words[0]):
        words = ["python", *words[1:]]
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    if words[:3] == ["python", "-m", "sparseattn"]:
        words = words[2:]
    if words[0] == "sparseattn":
        _check_ours(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets), f"make has the targets {targets}, not {words[1:]}"
    elif words[0] in ("python", "pytest", "benchmarks/gpu.sh"):
        _check_module(words)
    elif words[:2] == ["pip", "install"]:
        _check_extras(words[2:])
    else:
        assert words[0] in OTHERS, f"nobody checks {words}"


def _check_ours(words: list[str]) -> None:
    typer = pytest.importorskip("typer")
    from sparseattn.cli.app import app

    command = typer.main.get_command(app)
    name, rest = words[0], words[1:]
    assert name in command.commands, f"sparseattn has {list(command.commands)}, not {name}"
    if rest != ["--help"]:
        command.commands[name].make_context(name, rest)  # UsageError for what it does not know


def _check_module(words: list[str]) -> None:
    if words[0] == "python":
        words = words[1:]
        name = words[1].replace(".", "/") if words[0] == "-m" else words[0].removesuffix(".py")
        words = words[2 if words[0] == "-m" else 1 :]
        if name in ("mkdocs", "venv"):
            return
    else:
        name, words = words[0].removesuffix(".sh"), words[1:]
    if name == "pytest":
        files = [word.partition("::")[0] for word in words if not word.startswith("-")]
        assert all((ROOT / file).exists() for file in files), words
        return
    places = (ROOT / f"{name}.py", ROOT / f"{name}.sh", ROOT / name / "__main__.py")
    sources = [path for path in places if path.exists()]
    assert sources, f"there is no {name}"
    known = "".join(path.read_text() for path in [*sources, *sources[0].parent.glob("*.py")])
    for word in words:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in known or word in sources[0].read_text(), f"{name} has no {word}"


def _check_extras(words: list[str]) -> None:
    listed = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    known = re.findall(r"^([\w-]+) = \[", listed, re.M)
    for word in words:
        for extra in re.findall(r"\[([\w,-]+)\]", word):
            assert set(extra.split(",")) <= set(known), f"the extras are {known}, not {extra}"


@pytest.mark.parametrize(
    "line",
    [
        "sparseattn bench --selectors quest",
        "sparseattn bench --last many",
        "sparseattn nothing",
        "make nothing",
        "python -m benchmarks.speed --nothing 3",
        "python -m benchmarks.nothing",
        'pip install ".[nothing]"',
        "nothing at all",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    from typer import BadParameter  # of click, which typer may bring with it

    usage = BadParameter.__mro__[1]
    with pytest.raises((AssertionError, usage)):
        check(commands(line)[0])


def test_local_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target, _, place in (one.partition("#") for one in re.findall(r"\]\(([^)\s]+)\)", path.read_text())):
            if "://" in target:
                continue
            led = path.parent / target if target else path
            assert led.exists(), f"{path.name} links to {target}"
            if place:
                assert place in anchors(led), f"{path.name} links to {target}#{place}; there are {sorted(anchors(led))}"


def anchors(path: Path) -> set[str]:
    """Return the anchors that links into a document may name: those that GitHub and the site both give its headings.

    The site joins hyphens and spaces in a row to one hyphen, GitHub does not.
    """
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    github = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return {anchor for anchor in github if "--" not in anchor}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_api_pages_have_every_public_name() -> None:
    import sparseattn
    from scripts.site_pages import on_page_markdown

    pages = [on_page_markdown(page.read_text()) for page in (ROOT / "docs" / "reference" / "api").glob("*.md")]
    paths = re.findall(r"^::: (\S+)$", "\n".join(pages), re.M)
    shown = [getattr(import_module(module), name) for module, _, name in (path.rpartition(".") for path in paths)]
    missing = [
        name
        for name in sparseattn.__all__
        if name not in ("SELECTORS", "ROW_CODECS") and getattr(sparseattn, name) not in shown
    ]
    assert not missing, f"docs/reference/api/ lacks {missing}"


def test_every_page_is_reached_from_the_menu() -> None:
    nav, docs = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], ROOT / "docs"
    reached, left = set(), [docs / name for name in re.findall(r"[\w/-]+\.md", nav)]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)\s#]+\.md)[)#]", page.read_text())
            left += [path for link in links if "://" not in link and (path := (page.parent / link).resolve()).exists()]
    unreached = sorted(str(page.relative_to(docs)) for page in {*docs.rglob("*.md")} - reached)
    assert not unreached, f"neither the menu of mkdocs.yml nor a page that it reaches links to {unreached}"


def test_the_page_of_commands_names_every_command() -> None:
    typer = pytest.importorskip("typer")
    from sparseattn.cli.app import app

    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "reference" / "commands.md").read_text(), re.M)
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


def test_what_a_user_meets_first_is_at_most_20_000_words() -> None:
    assert sum(len(page.read_text().split()) for page in first_pages()) <= 20_000


def test_the_tree_names_files_that_are_there() -> None:
    tree = (ROOT / "docs" / "write" / "design.md").read_text().split("```text\n")[1].split("```")[0]
    folder = ROOT / "sparseattn"
    for line in tree.splitlines()[1:]:
        if start := re.match(r" {0,2}([a-z/_.]+) ", line):
            name = start[1]
            place = (ROOT if line[0] != " " else ROOT / "sparseattn") / name
            assert place.exists(), f"the tree names {name}"
            folder = place if place.is_dir() else place.parent
        for name in re.findall(r"\b\w+\.(?:py|sh)\b", line):
            assert (folder / name).exists() or (folder.parent / name).exists(), f"the tree names {name} in {folder}"
