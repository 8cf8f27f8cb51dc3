"""`sparseattn lm-eval`: lm-evaluation-harness with sparse decoding, and the proof that it was sparse."""

from __future__ import annotations

from sparseattn.cli.inputs import say_terms
from sparseattn.cli.lm_eval_options import LmEvalOptions
from sparseattn.reporting.activity_tables import by_task
from sparseattn.reporting.terminal import table_screen


def run(options: LmEvalOptions) -> None:
    """Run `sparseattn lm-eval`."""
    settings = options.settings
    try:
        from sparseattn.evaluation.harness.launch import arguments
        from sparseattn.evaluation.harness.launch import run as launched
    except ModuleNotFoundError as error:
        raise ImportError(
            f"`sparseattn lm-eval` needs the package {error.name}: pip install 'sparseattn[lm-eval]'"
        ) from error
    given = arguments(options.context.args)
    say_terms(str(given.model_args.get("pretrained")))
    table_screen().print(by_task(launched(given, settings)))
