"""How many threads compiled loops run on: torch's, or as many of them as pay for the work."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import threading

import numba
import torch

from sparseattn.utils import idle_threads

ONE_AT_A_TIME = threading.RLock()  # numba's plainest threads, all it has on some machines, abort where two callers meet
LET = threading.local()  # `threads`: what numba was last told in this thread, as telling it takes long (`use_threads`)
MOST_THREADS = numba.config.NUMBA_NUM_THREADS
EXPONENTIAL = 20  # multiplications that take as long as the exponentials and logarithms of one score's vote
# Multiplications for which one thread more pays: of threads that sleep, which it takes 50 to 60 us to wake (the log,
# 2026-11-22), of threads that spin for a while behind torch's last operation (2026-11-30), and amid an engine's step.
ASLEEP, SPINNING, STEP = 2_000_000, 400_000, 150_000


def spins() -> bool:
    """Return whether idle threads of compiled loops spin: OpenMP's, which torch shares, unless they are told to
    sleep."""
    if not idle_threads.spin():
        return False
    asked = numba.config.THREADING_LAYER
    layers = numba.config.THREADING_LAYER_PRIORITY if asked in ("default", "threadsafe") else [asked]
    for layer in itertools.takewhile(lambda layer: layer != "workqueue", layers):  # whose threads sleep
        try:
            importlib.import_module(f"numba.np.ufunc.{layer}pool")
        except ImportError:  # numba takes the next one
            continue
        return layer == "omp"
    return False


ALONE = SPINNING if spins() else ASLEEP


def use_threads(work: float = math.inf, alone: int = ALONE) -> int:
    """Lets numba's loops run on torch's threads, or on as many of them as pay for `work` multiplications, one more for
    each `alone`.

    numba is told only what it was not told before: amid a model, with cold caches, telling takes 15 to 40 us
    (the log, 2026-11-22).
    """
    threads = int(min(torch.get_num_threads(), MOST_THREADS, 1 + work / alone))
    if getattr(LET, "threads", None) != threads:
        of_torch = torch.get_num_threads()
        numba.set_num_threads(threads)
        if torch.get_num_threads() != of_torch:  # numba's first call sets the OpenMP runtime that it shares with torch
            torch.set_num_threads(of_torch)
        LET.threads = threads
    return threads


@functools.lru_cache(maxsize=4)
def scratch(size: int) -> torch.Tensor:
    """Return so many bytes for threads to work in: kept, as pages that are new to a process take as long to get as the
    work on them; used under `ONE_AT_A_TIME`."""
    return torch.empty(size, dtype=torch.uint8)


def parts() -> int:
    """Parts that parallel loops are cut into, a few for each thread, as keys differ in work."""
    return 4 * use_threads()
