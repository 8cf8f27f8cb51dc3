"""Shell completion: what is offered at TAB, by the scripts' own way in, and that no TAB waits for torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from sparseattn.cli import completion
from sparseattn.cli.machine_options import GPUS
from sparseattn.cost_model.known_models import named
from sparseattn.evaluation.builtin_traces import BUILTIN
from sparseattn.models.packaged import PACKAGED, REFERENCE
from sparseattn.selectors.registry import SELECTORS
from sparseattn.traces.texts import TEXTS
from tests.cli.test_app import run

SELECTED = """
import contextlib, io, json, os, sys
from sparseattn.__main__ import main
said = []
for asked in json.loads(sys.argv.pop()):
    os.environ.update(asked)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            assert not end.code, asked
    heavy = {"torch", "numpy", "transformers", "numba", "matplotlib"} & set(sys.modules)
    assert not heavy, (heavy, asked)
    said.append(out.getvalue())
print(json.dumps(said))
"""


def offered(lines: Iterable[str], shell: str = "bash") -> list[list[str]]:
    """Return what a shell offers at the end of each line, asked as the script of `--show-completion` asks."""
    every = [
        {
            "_SPARSEATTN_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(shlex.split(line) + [""] * line.endswith(" ")) - 1),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        for line in lines
    ]
    done = subprocess.run([sys.executable, "-c", SELECTED, json.dumps(every)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [[line for line in said.splitlines() if line] for said in json.loads(done.stdout)]


def test_bash_is_offered_the_names() -> None:
    names = {
        "sparseattn ben": ["bench"],
        "sparseattn bench --by-l": ["--by-layer"],
        "sparseattn bench --selector ": [*sorted(SELECTORS), "all"],
        "sparseattn serve smollm2 --selector no": ["none"],
        "sparseattn capture --model ": [REFERENCE, *PACKAGED],
        "sparseattn models --fetch ": list(PACKAGED),
        "sparseattn machine ": ["cpu", *GPUS],
        "sparseattn machine h100 --model ": list(named()),
        "sparseattn recommend --machine h1": ["h100"],
        "sparseattn bench ": list(BUILTIN),
        "sparseattn report --trace ": list(BUILTIN),
        "sparseattn eval --text ": list(TEXTS),
        "sparseattn eval --task passkey,k": ["passkey,kv"],
        "sparseattn info lowb": ["lowbit"],
        "sparseattn bench --selector mine:MeanK": [],  # the shell offers files
    }
    assert dict(zip(names, offered(names), strict=True)) == names


def test_zsh_and_fish_are_told_what_a_name_is() -> None:
    (models,) = offered(["sparseattn capture --model "], "zsh")
    assert '"smollm2":"SmolLM2-135M-Instruct' in "".join(models)
    (lines,) = offered(["sparseattn bench --selector "], "fish")
    assert [line.split("\t")[0] for line in lines] == [*sorted(SELECTORS), "all"]  # no phrase is on two lines


def test_each_shell_has_a_script_that_asks_the_command() -> None:
    code = """
import sys
from sparseattn.__main__ import main
for shell in ("bash", "zsh", "fish"):
    sys.argv[1:] = ["--show-completion", shell]
    try:
        main()
    except SystemExit as end:
        assert not end.code, shell
    print("-- end")
"""
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    *scripts, _ = done.stdout.split("-- end")
    for shell, script in zip(("bash", "zsh", "fish"), scripts, strict=True):
        assert set(re.findall(r"_SPARSEATTN_COMPLETE=complete_(\w+)", script)) == {shell}


def test_bash_takes_the_script_that_is_installed(tmp_path: Path) -> None:
    """The whole way: `--install-completion` writes it, and bash's own `complete` knows the command then."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    installed = "python -m sparseattn --install-completion && . ~/.bashrc && complete -p sparseattn".replace(
        "python", shlex.quote(sys.executable)
    )
    # typer asks the processes above it which shell this is, and finds the bash of this test
    done = subprocess.run(["bash", "-c", f"{installed}; true"], capture_output=True, text=True, env=environment)
    assert "complete -o default -F _sparseattn_completion sparseattn" in done.stdout, done.stdout + done.stderr


def test_the_two_options_stand_in_the_command_alone() -> None:
    assert "--install-completion" in run("--help").output
    assert "-completion" not in run("bench", "--help").output


def test_several_with_commas_are_not_offered_twice() -> None:
    complete = completion.several_of(["kv", "passkey", "words"])
    assert complete("") == ["kv", "passkey", "words"]
    assert complete("kv,") == ["kv,passkey", "kv,words"]
