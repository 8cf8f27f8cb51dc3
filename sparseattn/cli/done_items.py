"""What several processes of one run have measured, an item a file, until the first of them writes the records.

A file is there whole or not at all, so that a run that was killed goes on from them, with any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import sparseattn
from sparseattn.cli.progress import progress_bar
from sparseattn.roles.roles import Method
from sparseattn.traces.trace import Trace
from sparseattn.utils.hashing import tensors_hash
from sparseattn.utils.json_text import parse_entry
from sparseattn.utils.ranks import JobRanks
from sparseattn.utils.tensor_files import load_tensors, save_tensors

FORMAT, VERSION = "sparseattn-item", "1"


class DoneItems:
    """Items of a run in a folder.

    Args:
        folder: made with the first that is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, *key: Any) -> Path:
        """Return the file of the item with this key: all that its numbers depend on, for JSON or with a repr."""
        text = json.dumps([*key, sparseattn.__version__], sort_keys=True, default=repr)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"

    def read(self, path: Path) -> tuple[Any, dict[str, Tensor]] | None:
        """Return what was said of an item, and its tensors; None where it is not there.

        Raises:
            ValueError: a file that is damaged, which is to be removed.
        """
        if not path.exists():
            return None
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, "an item of a run")
            return parse_entry(metadata, "said"), tensors
        except ValueError as error:
            raise ValueError(f"{error}; remove it, and it is measured again") from error

    def write(self, path: Path, said: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write an item."""
        self.folder.mkdir(exist_ok=True)
        save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "said": json.dumps(said)})

    def share(
        self,
        ranks: JobRanks,
        paths: Sequence[Path],
        costs: Sequence[float],
        measure: Callable[[int], tuple[Any, Mapping[str, Tensor]]],
    ) -> None:
        """Measure what this process takes of items that are not there, and return once all processes have.

        Args:
            ranks: the processes.
            paths: of every item.
            costs: see `JobRanks.take`.
            measure: gives what is to be written of an item, by its number.
        """
        with progress_bar() as bar:
            task = bar.add_task(f"{ranks.count} processes", total=len(paths))
            for place in ranks.take(costs):
                if not paths[place].exists():
                    self.write(paths[place], *measure(place))
                bar.update(task, completed=ranks.advance())
            ranks.meet(lambda done: bar.update(task, completed=done))

    def remove(self) -> None:
        """Remove the folder, whose items are in the records now."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)


def key_of_method(method: Method) -> dict[str, Any]:
    """Return what tells the numbers of a method from another's, its code too: a class of one's own is edited."""
    return {"method": repr(method), "source": method.source()}


def key_of_trace(trace: Trace) -> dict[str, Any]:
    """Return what tells a trace from others: its tensors' hashes, or where it has none what it says of itself."""
    where = {"positions": tensors_hash({"positions": trace.positions}), "layers": trace.layers}
    return {"trace": trace.name, "meta": trace.meta, "hashes": trace.hashes, **where}
