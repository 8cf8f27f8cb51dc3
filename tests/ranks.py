"""Processes of torch.distributed for tests: a module of `lives` in each, and what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def found(module: str, folder: Path, ranks: int, names: Any, timeout: int) -> dict[str, list[Any]]:
    """What `ranks` processes of a module found, by life: a list over its ranks.

    Args:
        module: which calls `main` with its lives.
        folder: an empty one, for what they write.
        names: what they are to do, in JSON.
    """
    around = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder), json.dumps(names)],
            cwd=ROOT, env=around | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(said)
    of_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [own[name] for own in of_rank if name in own] for name in of_rank[0]}


def main(lives: Callable[[Any, int], Iterable[tuple[str, Any]]]) -> None:
    """Run lives, given names and the number of processes, in one of them, and write what they found."""
    import torch
    import torch.distributed as dist

    folder, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    (folder / f"{rank}.json").write_text(json.dumps(dict(lives(names, size))))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo and numba are not waited for
