"""Query-aware sparse attention for long-context decoding: select the rows that a query needs, attend to them alone."""

from sparseattn.attention import decode
from sparseattn.cache import KVCache
from sparseattn.kernels import attend, merge
from sparseattn.metrics import Evaluation, evaluate
from sparseattn.selection import Bounds, Selection
from sparseattn.selectors import (
    HNSW,
    IVF,
    PQ,
    SAAP,
    SELECTORS,
    Exact,
    Fier,
    Flat,
    KDEformer,
    KMeans,
    LowBit,
    MagicPIG,
    Moments,
    PageSelector,
    PerfectBuckets,
    QueryBridge,
    Quest,
    Random,
    Reformer,
    RetrievalAttention,
    Rows,
    Selector,
    SelfIndex,
    TwoStage,
    Window,
    make_selector,
)

__version__ = "0.1.0"

__all__ = [
    "HNSW",
    "IVF",
    "PQ",
    "SAAP",
    "SELECTORS",
    "Bounds",
    "Evaluation",
    "Exact",
    "Fier",
    "Flat",
    "KDEformer",
    "KMeans",
    "KVCache",
    "LowBit",
    "MagicPIG",
    "Moments",
    "PageSelector",
    "PerfectBuckets",
    "QueryBridge",
    "Quest",
    "Random",
    "Reformer",
    "RetrievalAttention",
    "Rows",
    "Selection",
    "Selector",
    "SelfIndex",
    "TwoStage",
    "Window",
    "attend",
    "decode",
    "evaluate",
    "make_selector",
    "merge",
]
