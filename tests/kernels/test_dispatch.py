"""Every operation's folder keeps to one form: an implementation has the functions that its dispatch calls."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from sparseattn.kernels import implementations
from sparseattn.kernels.implementations import FILES, Operation

KERNELS = Path(implementations.__file__).parent
DISPATCHES = sorted(KERNELS.glob("*/dispatch.py"))
OPERATION = re.compile(r"^(\w+) = Operation\(__package__, (.*?)(?:, fallback=.*)?\)$", re.MULTILINE)
CALL = re.compile(r"(?:(\w+)\.pick\(.*\)|_pick\(.*\)|\bkernel)\.(\w+)\(")


def functions(path: Path) -> dict[str, list[str]]:
    """Names of a file's functions, and of those that it passes on from a file beside it -> their arguments."""
    body = ast.parse(path.read_text()).body
    found = {node.name: [part.arg for part in node.args.args] for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.asname == alias.name:
                    found[alias.name] = functions(path.parent / f"{node.module.rpartition('.')[2]}.py")[alias.name]
    return found


@pytest.mark.parametrize("path", DISPATCHES, ids=lambda path: path.parent.name)
def test_implementations_have_the_functions_that_are_called_with_the_same_arguments(path: Path) -> None:
    source = path.read_text()
    operations = {name: re.findall(r'"(\w+)"', names) for name, names in OPERATION.findall(source)}
    assert operations
    called = CALL.findall(source)
    assert called
    for operation, function in called:
        names = operations[operation] if operation else next(iter(operations.values()))
        arguments = [functions(path.parent / f"{FILES[name]}.py")[function] for name in names]
        own = [[part for part in each if part != "splits"] for each in arguments]  # of a test, in `attend`'s kernels
        assert all(each == own[0] for each in own), (function, own)


def test_every_kernel_file_belongs_to_an_operation() -> None:
    folders = {path.parent for path in DISPATCHES}
    for file in {f"{name}.py" for name in FILES.values()}:
        assert {path.parent for path in KERNELS.glob(f"*/{file}")} <= folders


def test_a_named_implementation_runs_or_raises_and_the_default_takes_what_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, float64 = torch.device("cpu"), torch.float64
    choose = implementations.choose.__wrapped__  # which does not keep what it has found
    assert choose("torch", host, float64) == choose(None, host, float64) == "torch"
    with pytest.raises(ValueError, match="impl is one of torch, numba or None, got 'triton'"):
        choose("triton", host, torch.float32, ("torch", "numba"))
    monkeypatch.setattr(implementations, "why_not_numba", lambda device, dtype: "a reason")
    assert choose(None, host, torch.float32) == "torch"
    with pytest.raises(RuntimeError, match='impl="numba" cannot run: a reason'):
        choose("numba", host, torch.float32)
    monkeypatch.setattr(implementations, "why_not_triton", lambda device, dtype: None)
    assert choose(None, torch.device("cuda"), torch.float32) == "triton"
    assert choose(None, torch.device("cuda"), torch.float32, ("torch", "numba")) == "torch"


def test_what_is_left_to_torch_is_the_fallback() -> None:
    operation = Operation("sparseattn.kernels.attend", "reference", "gather", "numba", fallback="gather")
    picked = operation.pick(None, torch.device("cpu"), torch.float32, torch_only=True)
    assert picked.__name__ == "sparseattn.kernels.attend.gather"
