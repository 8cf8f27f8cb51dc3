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
    InfiniGen,
    InfLLM,
    KMeans,
    LowBit,
    Moments,
    PageSelector,
    PerfectBuckets,
    QueryBridge,
    Quest,
    Random,
    RetrievalAttention,
    RobustVamana,
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
    "InfLLM",
    "InfiniGen",
    "KMeans",
    "KVCache",
    "LowBit",
    "Moments",
    "PageSelector",
    "PerfectBuckets",
    "QueryBridge",
    "Quest",
    "Random",
    "RetrievalAttention",
    "RobustVamana",
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
