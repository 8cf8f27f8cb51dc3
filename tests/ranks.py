"""Processes of torch.distributed for tests: the `lives` of a module in each, and what they found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def found(module: str, folder: Path, ranks: int, names: Any, timeout: int) -> dict[str, list[Any]]:
    """Return what `ranks` processes of a module found, by life: a list over its ranks.

    Args:
        module: which calls `main` with its lives.
        folder: an empty one, for what they write.
        names: what they are to do, in JSON.
    """
    around = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with subprocess.Popen(
        [sys.executable, "-m", module, str(folder), json.dumps(names)],
        cwd=ROOT, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    ) as first:  # fmt: skip
        try:
            said, _ = first.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(first.pid, signal.SIGKILL)
            said = f"no end within {timeout} s: {first.communicate()[0]}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 0, said
    of_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [own[name] for own in of_rank if name in own] for name in of_rank[0]}


def main(lives: Callable[[Any, int], Iterable[tuple[str, Any]]]) -> None:
    """Run lives, given names and the number of processes, and write what they found.

    The others are forked from this process, which waits for them, so that the module's imports are made once.
    """
    import torch
    import torch.distributed as dist

    folder, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, size = 0, int(os.environ["WORLD_SIZE"])
    others: list[int] = []
    for number in range(1, size):
        if not (other := os.fork()):
            rank, others = number, []
            break
        others.append(other)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    (folder / f"{rank}.json").write_text(json.dumps(dict(lives(names, size))))
    dist.barrier()
    dist.destroy_process_group()
    failed = any(os.waitpid(other, 0)[1] for other in others)
    sys.stdout.flush()
    os._exit(failed)  # threads of gloo and numba are not waited for
