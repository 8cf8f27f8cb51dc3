"""Training SAAP, https://arxiv.org/abs/2502.08246: from traces of many prompts to an artefact that selectors load.

recipe.py what decides a run, prompts.py the traces, kmeans.py the buckets of keys, examples.py what is learned from,
classifier.py the bucket of a query, validation.py what it is measured by, fit.py its training, partial.py what a killed
run goes on from, run.py the run. calibrate.py is of other methods: what Loki and Double Sparsity take from traces.
"""

from sparseattn.training.calibrate import calibrate
from sparseattn.training.partial import Progress
from sparseattn.training.recipe import Filters, Recipe, TrainingError
from sparseattn.training.run import train

__all__ = ["Filters", "Progress", "Recipe", "TrainingError", "calibrate", "train"]
