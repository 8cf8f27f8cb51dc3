"""Builds sdist and wheel, checks them, and tries the wheel in a new environment without extras: the README's first
offline example and every `--help`.

    python scripts/release_check.py [--tag v0.1.0]

Everything lies in `build/release`: `dist` holds what can be uploaded. With `--tag` the version must be the tag's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "release"
DECODES = """
from sparseattn import KVCache, decode
cache = KVCache(MeanKey())  # the README's own method
cache.append(*torch.randn(2, 1, 2, 512, 64))
assert decode(torch.randn(1, 2, 4, 64), cache, budget=64).isfinite().all()
"""
BLOCK = re.compile(r"^(?P<mark><!-- [^\n]* -->\n+)?^```python\n(?P<code>.*?)^```$", re.S | re.M)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="the tag of the release, `v` and the version")
    tag = parser.parse_args(arguments).tag
    shutil.rmtree(FOLDER, ignore_errors=True)
    wheel = build()
    version = wheel.name.split("-")[1]
    if tag is not None and tag != f"v{version}":
        sys.exit(f"release_check: the tag is {tag}, but sparseattn/__init__.py says {version}: tag v{version}")
    try_wheel(wheel)
    print(f"release_check: sparseattn {version} can be released from {wheel.parent.relative_to(ROOT)}")


def build() -> Path:
    """Return the wheel, which is made from the sdist as an installer would."""
    tools = FOLDER / "tools"
    venv.create(tools, with_pip=True)
    run(python_of(tools), "-m", "pip", "install", "--quiet", *requirements("release"))
    dist = FOLDER / "dist"
    run(python_of(tools), "-m", "build", "--outdir", dist, ROOT)
    run(python_of(tools), "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    (wheel,) = dist.glob("*.whl")
    return wheel


def try_wheel(wheel: Path) -> None:
    """Install the wheel without extras, outside the repository's path, and run what must work of that."""
    environment = FOLDER / "env"
    run(ROOT / "scripts" / "venv", "", VENV=str(environment), PACKAGE=str(wheel))
    code = FOLDER / "example.py"
    code.write_text(offline_examples((ROOT / "README.md").read_text()) + DECODES)
    run(python_of(environment), "-I", code)
    console = environment / "bin" / "sparseattn"
    for arguments in (["--version"], ["--help"], *([name, "--help"] for name in commands(environment))):
        run(console, *arguments)


def commands(environment: Path) -> list[str]:
    """Return the names of the console command's commands, as the installed wheel has them."""
    code = "from sparseattn.cli.app import COMMANDS; print(*COMMANDS)"
    done = subprocess.run([python_of(environment), "-I", "-c", code], cwd=FOLDER, env=clean(), capture_output=True)
    return done.stdout.decode().split() or sys.exit(f"release_check: no commands: {done.stderr.decode()}")


def offline_examples(readme: str) -> str:
    """Return the Python blocks without a comment above them, which would name a model or say why they cannot run."""
    return "\n".join(found["code"] for found in BLOCK.finditer(readme) if not found["mark"])


def requirements(extra: str) -> list[str]:
    """Return what pyproject.toml lists for the extra, read as text: Python 3.10 has no `tomllib`."""
    (listed,) = re.findall(rf"^{extra} = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M)
    return re.findall(r'"([^"]+)"', listed)


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def clean() -> dict[str, str]:
    """Return the environment without paths by which Python would find this checkout in place of the wheel."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(*command: str | Path, **variables: str) -> None:
    """Run in `build/release`, where no folder shadows the installed package; end with the command's failure."""
    done = subprocess.run(command, cwd=FOLDER, env=clean() | variables)
    if done.returncode:
        sys.exit(f"release_check: {' '.join(str(word) for word in command)} ended with {done.returncode}")


if __name__ == "__main__":
    main(sys.argv[1:])
