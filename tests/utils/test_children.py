"""A Python that is started as a child imports nothing from the folder that it is started in."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparseattn.serving.vllm import offline
from sparseattn.utils import children, pypi_wheels

PLANTED = ("pip", "vllm", "json", "random", "runpy", "subprocess", "zipfile")


def planted(folder: Path) -> Path:
    """A new folder of modules; the file, returned, that one of them leaves when it is imported."""
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    return folder / "ran"


HOWS = [
    pytest.param(children.RUN, id="as here"),
    pytest.param(["-c", children.WITHOUT_FOLDER], id="as Python 3.10"),
]


@pytest.mark.parametrize("how", HOWS)
def test_fetching_a_wheel_runs_nothing_of_the_current_folder(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = planted(tmp_path / "here")
    index, work = tmp_path / "index", tmp_path / "work"
    index.mkdir()
    work.mkdir()
    with zipfile.ZipFile(index / "harmless-1.0-py3-none-any.whl", "w") as held:
        about = "harmless-1.0.dist-info"
        held.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n")
        held.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        held.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(children, "RUN", how)
    monkeypatch.chdir(tmp_path / "here")
    held = pypi_wheels.wheel("harmless", "1.0", 1, work, lambda *_: None, "it")
    assert held.name == "harmless-1.0-py3-none-any.whl"
    assert not ran.exists(), ran.read_text()


@pytest.mark.parametrize("how", HOWS)
def test_a_module_runs_as_python_m_runs_it(how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages").mkdir()
    code = "import sys\nassert __name__ == '__main__'\nprint(sys.argv, sys.warnoptions)\nsys.exit(3)\n"
    (tmp_path / "packages" / "shows.py").write_text(code)
    ran = planted(tmp_path / "here")
    monkeypatch.setattr(children, "RUN", how)
    command = children.module("shows", "a", "-b", options=["-W", "ignore::DeprecationWarning"])
    around = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run(command, cwd=tmp_path / "here", env=around, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    shown = str(tmp_path / "packages" / "shows.py")
    assert done.stdout == f"{[shown, 'a', '-b']} ['ignore::DeprecationWarning']\n"
    assert not ran.exists()


def test_an_engine_in_this_process_starts_its_children_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def engine(**_: object) -> SimpleNamespace:
        seen.append(os.environ.get(children.SAFE))
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=1))

    for name in (children.SAFE, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set now is taken back
    monkeypatch.setattr(offline, "check_offline", lambda: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    offline.Offline("model", None, "auto", 1, 1)
    assert seen == ["1"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not heed PYTHONSAFEPATH")
def test_nor_do_the_childs_own_children(tmp_path: Path) -> None:
    ran = planted(tmp_path / "here")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, random'], check=True)"
    (tmp_path / "starts.py").write_text(code)
    around = children.environment({**os.environ, "PYTHONPATH": str(tmp_path)})
    subprocess.run(children.module("starts"), cwd=tmp_path / "here", env=around, check=True)
    assert not ran.exists(), ran.read_text()
