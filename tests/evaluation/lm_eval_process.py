"""`sparseattn` in a process of a test's, where lm-eval knows the tasks of `--include_path` alone: it reads its 13,000
files of others in seconds. `python -m tests.evaluation.lm_eval_process lm-eval ...`."""

from __future__ import annotations

import functools
import sys

from lm_eval import tasks

from sparseattn.cli.app import app

if __name__ == "__main__":
    tasks.TaskManager = functools.partial(tasks.TaskManager, include_defaults=False)  # type: ignore[assignment, misc]
    app(sys.argv[1:])
