"""Training on traces of many prompts, to files that selectors load: SAAP, https://arxiv.org/abs/2502.08246, and others.

recipe.py what decides a run, prompts.py the traces, kmeans.py the buckets of keys, examples.py what is learned from,
classifier.py the bucket of a query, validation.py what it is measured by, fit.py its training, partial.py what a killed
run goes on from, run.py the run. Of other methods are calibrate.py, what Loki and Double Sparsity take from traces,
query_codes.py, what querypq codes keys by, retaining.py, Locret's heads, window_books.py, what a2ats does,
index_run.py, what hata and indexer learn, learned_index.py, how they are fitted, and layer_files.py, what a killed run
of these goes on from; shared_layers.py searches which layers share a choice, and head_errors.py which heads retrieve.
"""

from sparseattn.training.calibrate import calibrate
from sparseattn.training.index_run import IndexRecipe, train_index
from sparseattn.training.partial import Progress
from sparseattn.training.query_codes import CodesRecipe, train_codes
from sparseattn.training.recipe import Filters, Recipe, TrainingError
from sparseattn.training.retaining import RetainingRecipe, train_retaining
from sparseattn.training.run import train
from sparseattn.training.window_books import WindowRecipe, train_window

__all__ = [
    "CodesRecipe",
    "Filters",
    "IndexRecipe",
    "Progress",
    "Recipe",
    "RetainingRecipe",
    "TrainingError",
    "WindowRecipe",
    "calibrate",
    "train",
    "train_codes",
    "train_index",
    "train_retaining",
    "train_window",
]
