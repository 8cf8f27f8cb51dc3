"""Query-aware sparse attention for long-context decoding: select the rows that a query needs, attend to them alone."""

from sparseattn.attention import decode
from sparseattn.cache import KVCache
from sparseattn.kernels import attend, merge
from sparseattn.metrics import Evaluation, evaluate
from sparseattn.selection import Bounds, Selection
from sparseattn.selectors import SELECTORS, Exact, Quest, Random, Rows, Selector, Window, make_selector

__version__ = "0.1.0"

__all__ = [
    "SELECTORS",
    "Bounds",
    "Evaluation",
    "Exact",
    "KVCache",
    "Quest",
    "Random",
    "Rows",
    "Selection",
    "Selector",
    "Window",
    "attend",
    "decode",
    "evaluate",
    "make_selector",
    "merge",
]
