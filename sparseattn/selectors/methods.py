"""Every method of this package, a row each: text alone, so that reading it imports no class and no torch.

A method's row stands in the `methods.py` of its family's folder. `sparseattn.SELECTORS`, `sparseattn info` and the
tables of the documents come from these rows, in this order. A method of a user has no row and needs none.
"""

from __future__ import annotations

from sparseattn.selectors.baselines import methods as baselines
from sparseattn.selectors.clusters import methods as clusters
from sparseattn.selectors.combined import methods as combined
from sparseattn.selectors.eviction import methods as eviction
from sparseattn.selectors.graphs import methods as graphs
from sparseattn.selectors.hashing import methods as hashing
from sparseattn.selectors.method_row import BASE as BASE
from sparseattn.selectors.method_row import MethodRow as MethodRow
from sparseattn.selectors.pages import methods as pages
from sparseattn.selectors.tokens import methods as tokens

FAMILIES = (pages, tokens, clusters, graphs, hashing, eviction, combined, baselines)
METHODS = {name: row for family in FAMILIES for name, row in family.METHODS.items()}
NAMES = {BASE + method.place: name for name, method in METHODS.items()}  # class -> name
