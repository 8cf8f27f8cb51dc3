"""The pictures that commands draw, a file for each kind; `panels.py` is the one file that needs matplotlib."""

from sparseattn.reporting.plots.bench_frontier import frontier
from sparseattn.reporting.plots.bench_layers import alike, by_layer
from sparseattn.reporting.plots.bench_steps import by_step
from sparseattn.reporting.plots.eval_agreement import agreement
from sparseattn.reporting.plots.eval_scores import accuracy, heat
from sparseattn.reporting.plots.eval_servers import servers
from sparseattn.reporting.plots.inspect_attention import inspection, needed_pages, needed_rows
from sparseattn.reporting.plots.recall_curves import recall, scaling

__all__ = [
    "accuracy",
    "agreement",
    "alike",
    "by_layer",
    "by_step",
    "frontier",
    "heat",
    "inspection",
    "needed_pages",
    "needed_rows",
    "recall",
    "scaling",
    "servers",
]
