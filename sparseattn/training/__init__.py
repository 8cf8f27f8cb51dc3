"""Training SAAP, https://arxiv.org/abs/2502.08246: from traces of many prompts to an artefact that selectors load.

data.py prompts and their samples, kmeans.py the buckets of keys, classifier.py the bucket of a query, run.py the run.
"""

from sparseattn.training.data import Filters, TrainingError
from sparseattn.training.run import Recipe, train

__all__ = ["Filters", "Recipe", "TrainingError", "train"]
