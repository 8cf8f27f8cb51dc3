"""Nothing that is read runs: files and records import no module that the user has not named, nor does the current
folder bring any."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import Result

import sparseattn
from sparseattn import KVCache, Quest, Rows, decode
from sparseattn.cache.index_files import FORMAT, VERSION, IndexFileError, load_index
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.recommend.trials import FRONTIER, Trials, _measured_as, averaged
from sparseattn.roles.fingerprint import fingerprint
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.selectors.trust import check_trusted, named_modules, trusted_modules
from sparseattn.serving.vllm.settings import Settings, parse
from sparseattn.traces.synthetic import synthetic
from sparseattn.utils.tensor_files import load_tensors, save_tensors
from tests import report_records
from tests.cases import attention
from tests.command import run
from tests.models.tiny import small

MODEL = {"name": "some", "fingerprint": "0123456789abcdef"}
SPEC = "evilmod:X"
EVIL = """
from pathlib import Path

Path(__file__).with_suffix(".ran").touch()
from sparseattn import Quest


class X(Quest):
    pass
"""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A module `evilmod` that Python would find; whether it ran."""
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "evilmod.py").write_text(EVIL)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    importlib.invalidate_caches()
    return (folder / "evilmod.ran").exists


def said(done: Result) -> str:
    return " ".join(done.output.split())


# -- the texts of selectors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("quest:page=8,group=sum", []),
        ("sparseattn:Fitted:inner=quest", []),
        ("sparseattn.selectors.baselines.exact:Exact", []),
        ("mine:X", ["mine"]),
        ("a.b:X:page=8", ["a.b"]),
        ("twostage:pages=mine:X,times=4", ["mine"]),
        ("twostage:pages=[tailed:inner=[mine:X:page=8],rows=64]", ["mine"]),
        ("mine:X:inner=[other:Y],outer=mine:Z", ["mine", "other"]),
        ("sparseattn.__main__:app", ["sparseattn.__main__"]),
        ("sparseattn.selectorsx:X", ["sparseattn.selectorsx"]),
    ],
)
def test_a_text_says_which_modules_it_names(text: str, modules: list[str]) -> None:
    assert named_modules([text]) == modules


def test_no_module_is_imported_that_a_text_was_not_seen_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `make_selector` makes of it: texts drawn from what texts are made of."""
    imported: list[str] = []
    assert all(SELECTORS.values()), "the package's own are imported before"

    def watched(module: str) -> Any:
        imported.append(module)
        if module == "good":  # whose class takes a selector, so that its arguments are looked into
            return SimpleNamespace(T=sparseattn.TwoStage)
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", watched)
    parts = ["quest", "twostage", "exact", "good:T", "evil:X", "a.b:C", "_e:_X", "good", "evil", "X", "é:Y", "evil:Xé"]
    parts += [":", ":", ":", "=", "=", "[", "]", ",", " ", "\n", ".", "8"]
    parts += ["twostage:pages=", "pages=", ":pages=[", "pages=[", "]", "times=4", "page=8"]
    draw, seen = random.Random(5), 0
    for _ in range(20_000):
        text = "".join(draw.choice(parts) for _ in range(draw.randint(1, 7)))
        imported.clear()
        with contextlib.suppress(ValueError):
            make_selector(text)
        assert set(imported) <= set(named_modules([text])), text
        seen += bool(imported)
    assert seen > 500, "it draws texts that import"


def test_a_trusted_module_stands_for_those_below_it_and_for_no_other() -> None:
    for text in ("mine:X", "mine.below:X", "quest", "twostage:pages=mine:X"):
        check_trusted(text, {"mine"})
    for text in ("mined:X", "other:X", "twostage:pages=[other:X:page=8]"):
        with pytest.raises(ValueError, match=r"names a class of the module (mined|other), whose code would run"):
            check_trusted(text, {"mine"})


@pytest.mark.parametrize("given", ["mine", {"mine:X"}, {""}, {"mine."}, {7}, ["mine/x"]], ids=str)
def test_what_is_no_set_of_modules_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"trusted modules are a set, such as \{'mine'\}|named without a class"):
        trusted_modules(given)


# -- plans and roles ---------------------------------------------------------------------------------------------------

GIVEN: list[Any] = [
    SPEC,
    {"method": SPEC, "budget": 64},
    ["dense", SPEC],
    ["dense", {"method": f"twostage:pages=[{SPEC}:page=8],times=4", "budget": 64}],
    f"twostage:pages={SPEC}",
]


def file_of(kind: type[Roles], path: Path, given: Any, **changed: Any) -> Path:
    roles = Plan({0: "dense", 1: "dense"}, model=MODEL) if kind is Plan else Roles({0: "dense", 1: "dense"})
    path.write_text(json.dumps({**roles.record(), "layers": {"0": "dense", "1": given}, **changed}))
    return path


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("kind", [Roles, Plan])
def test_a_file_imports_no_module_but_those_that_are_trusted(
    kind: type[Roles], given: Any, tmp_path: Path, evil: Callable[[], bool]
) -> None:
    path = file_of(kind, tmp_path / "file.json", given)
    for trusted in ((), {"evil"}, {"evilmod.x"}):
        with pytest.raises(ValueError, match="names a class of the module evilmod") as error:
            kind.load(path, trusted=trusted)
        for words in (str(path), "layer 1", "add --trust evilmod to the command", "trusted={'evilmod'} in Python"):
            assert words in str(error.value)
        assert not evil()
        assert "evilmod" not in sys.modules
    loaded = kind.load(path, trusted={"evilmod"})
    assert evil()
    assert "evilmod:X" in {str(part).partition(":page")[0] for one in loaded.distinct() for part in one.selector.tree()}


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama", num_attention_heads=4, num_key_value_heads=2)


def test_a_cache_takes_trusted_modules_and_asks_for_the_weights_first(
    llama: Any, tmp_path: Path, evil: Callable[[], bool]
) -> None:
    layers = {"layers": {"0": "dense", "1": {"method": SPEC, "budget": 64}, "2": "window"}}
    other, plan = (file_of(Plan, tmp_path / name, SPEC, **layers) for name in ("other.json", "plan.json"))
    own = {"name": "llama", "fingerprint": fingerprint(llama.named_parameters())}
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "model": own}))
    roles = file_of(Roles, tmp_path / "roles.json", SPEC, **layers)
    with pytest.raises(ValueError, match="plan plan was made for the weights of some"):
        SparseCache(llama, plan=other, trusted={"evilmod"})
    for given in ({"plan": plan}, {"roles": roles}):
        with pytest.raises(ValueError, match=r"names a class of the module evilmod.*trusted=\{'evilmod'\}"):
            SparseCache(llama, **given)
    assert not evil()
    for given in ({"plan": plan}, {"roles": roles}):
        with SparseCache(llama, trusted={"evilmod"}, **given) as cache:
            assert cache.sparse_layers[1].label == "evilmod:X at 64"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.safetensors"
    synthetic(300, heads=1, group=2, size=32, layers=2, clusters=8).save(path)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is not on Python's path, with a module `evilmod` in it."""
    (tmp_path / "evilmod.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one and Path(one) != tmp_path])
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def test_a_command_trusts_what_its_options_name(trace: Path, here: Path) -> None:
    file_of(Roles, here / "roles.json", {"method": SPEC, "budget": 64})
    command = ["bench", trace, "--last", 2, "--window", 8, "--roles", "roles.json", "--no-figures", "--out", "out"]
    refused = run(*command)
    assert refused.exit_code == 2
    assert "roles.json is no file of roles that can be used: layer 1: 'evilmod:X' names a class of" in said(refused)
    assert not (here / "evilmod.ran").exists()
    assert str(here) not in sys.path
    assert "is named without a class, such as mine or package.mine, got 'evilmod:X'" in said(
        run(*command, "--trust", SPEC)
    )
    assert not (here / "evilmod.ran").exists()
    without = [word for word in command if word not in ("--roles", "roles.json")]
    assert "--trust evilmod is for a file of roles or a plan" in said(run(*without, "--trust", "evilmod"))
    assert not (here / "evilmod.ran").exists()
    for more in (["--trust", "evilmod"], ["--selector", SPEC, "--budget", 64]):
        done = run(*command, *more)
        assert done.exit_code == 0, done.output
        assert "roles roles" in done.output
    assert sys.path[-1] == str(here), "behind all else"


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_the_other_commands_refuse_a_plan_before_any_work(command: str, here: Path) -> None:
    file_of(Plan, here / "plan.json", SPEC)
    where = ["serve", "reference"] if command == "serve" else ["eval", "--model", "reference", "--out", "out"]
    refused = run(*where, "--plan", "plan.json")
    assert refused.exit_code == 2
    assert "plan.json is no file of plan that can be used: layer 1: 'evilmod:X' names a class of" in said(refused)
    assert not (here / "evilmod.ran").exists()
    run(*where, "--plan", "plan.json", "--trust", "evilmod")  # which goes on, and fails for other reasons
    assert (here / "evilmod.ran").exists()


# -- vLLM, whose engine is another process -----------------------------------------------------------------------------


def test_an_engine_is_told_where_the_users_modules_lie(here: Path) -> None:
    settings = parse({"selector": SPEC, "budget": 64, "modules": str(here)})
    assert str(here) not in sys.path, "but while the modules are imported"
    assert settings.each()[0].label() == "evilmod:X"
    assert settings.to_dict()["modules"] == str(here)
    assert parse(settings.to_dict()) == settings
    assert "modules" not in Settings("quest", 64).to_dict()
    assert parse({"layers": {"0": "window"}, "modules": str(here)}).modules == str(here)
    for wrong, words in (
        ("here", "modules is the whole path of a folder, got 'here'"),
        (7, "modules is text, got 7"),
    ):
        with pytest.raises(ValueError, match=words):
            parse({"selector": "quest", "budget": 64, "modules": wrong})


# -- index files -------------------------------------------------------------------------------------------------------


class Mine(Quest):
    """A class of a user's own."""


def rows() -> Rows:
    _, keys, values = attention(1, 2, 2, 64, 16)
    return Rows(keys, values, torch.arange(64)[None])


def test_an_index_file_imports_nothing(tmp_path: Path, evil: Callable[[], bool]) -> None:
    queries, keys, values = attention(1, 2, 2, 200, 16)
    found = []
    for _ in range(2):  # built, and read back: the class is there, so its name is compared and nothing imported
        cache = KVCache(Mine(), sink=4, window=8, indexes=tmp_path / "indexes")
        cache.append(keys, values)
        found.append(decode(queries[:, :, :, -1], cache, 32))
    assert torch.equal(*found)
    (path,) = (tmp_path / "indexes").iterdir()
    metadata, state = load_tensors(path, FORMAT, VERSION, "an index")
    assert metadata["selector"] == f"{__name__}:Mine"
    save_tensors(path, state, {**metadata, "selector": SPEC})
    with pytest.raises(IndexFileError, match=f"is an index of evilmod:X, here it would be {__name__}:Mine"):
        load_index(Mine(), rows(), path)
    assert run("info", path).exit_code == 0
    assert not evil()


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_report_imports_no_module_that_a_record_names(tmp_path: Path, evil: Callable[[], bool]) -> None:
    lines = report_records.recommended()
    nested = f"twostage:pages=[{SPEC}]"
    for one in lines:
        if one.get("method") == "exact":
            one["method"] = SPEC
        if one["record"] == "plan":
            one["layers"]["1"] = [{"method": nested, "budget": 64}, "mean:bits=8"]
    report_records.write(tmp_path / "records" / "recommend.jsonl", lines)
    done = run("report", tmp_path / "records", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert not evil()
    page = (tmp_path / "page.html").read_text()
    for shown in (SPEC, nested, "mean:bits=8"):
        assert json.dumps(shown) in page


def test_a_record_of_recommend_cannot_call_itself_another_method(evil: Callable[[], bool]) -> None:
    """What a run goes on from may be somebody else's, and a record's source is no secret."""
    group = [Role("quest", 64)]
    method, source = _measured_as(group)
    points = [{"budget": 64, "kl": 0.1, "kl_heads": [0.1], "error_heads": [0.1], "bytes_heads": [0.1]}]
    shared = {"number": 0, "layer": 0, "source": source, "points": points}
    lines = [{**shared, "method": name} for name in (SPEC, method)]
    records: Any = SimpleNamespace(of=lambda kind: lines if kind == FRONTIER else [])
    nothing: Any = None
    found = Trials(nothing, nothing, records, nothing).frontiers([group])
    assert [one["method"] for one in found] == ["quest"]
    assert list(averaged(found)[0]) == group
    assert not evil()


# -- the current folder ------------------------------------------------------------------------------------------------

PLANTED = ("evilmod", "flash_attn", "kernels", "xformers")
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from sparseattn.cli.app import app

for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (0, 2), (arguments, done.output, done.exception)
"""


def test_a_file_in_the_current_folder_is_no_module_of_ours(tmp_path: Path) -> None:
    """As the console script starts: Python's own path holds the script's folder and not the current one."""
    script, folder = tmp_path / "bin" / "run.py", tmp_path / "foreign"
    for one in (script.parent, folder):
        one.mkdir()
    script.write_text(COMMANDS)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\n")
    report_records.write(folder / "records" / "recommend.jsonl", report_records.recommended())
    file_of(Roles, folder / "roles.json", SPEC)
    file_of(Plan, folder / "plan.json", SPEC)
    load = ["--text", "alice", "--task", "agreement", "--lengths", "256", "--samples", "1", "--last", "2"]
    load += ["--model", "reference", "--selector", "quest", "--budget", "64", "--no-figures"]
    commands = [
        ["report", "records"],
        ["bench", "--help"],
        ["info"],
        ["models"],
        ["bench", "--roles", "roles.json"],
        ["eval", "--plan", "plan.json"],
        ["serve", "reference", "--plan", "plan.json"],
        ["eval", *load],
    ]
    around = {**os.environ, "PYTHONPATH": str(Path(sparseattn.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, script, json.dumps(commands)], cwd=folder, env=around, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").exists()
    assert not [name for name in PLANTED if (tmp_path / name).exists()]
