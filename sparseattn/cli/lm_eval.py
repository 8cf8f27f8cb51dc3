"""`sparseattn lm-eval`: lm-evaluation-harness with sparse decoding, and the proof that it was sparse."""

from __future__ import annotations

import importlib.util

from sparseattn.cli.inputs import say_terms
from sparseattn.cli.lm_eval_options import LmEvalOptions
from sparseattn.reporting.activity_tables import by_task
from sparseattn.reporting.terminal import table_screen


def run(options: LmEvalOptions) -> None:
    """Run `sparseattn lm-eval`."""
    settings = options.settings
    for package in ("transformers", "lm_eval"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"`sparseattn lm-eval` needs the package {package}: pip install 'sparseattn[lm-eval]'")
    from sparseattn.evaluation.harness.launch import arguments
    from sparseattn.evaluation.harness.launch import run as launched

    given = arguments(options.context.args)
    say_terms(str(given.model_args.get("pretrained")))
    ran = launched(given, settings, options.tensor_parallel)
    if ran is not None:
        table_screen().print(by_task(ran))
