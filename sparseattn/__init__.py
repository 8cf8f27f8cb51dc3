"""Query-aware sparse attention for long-context decoding: select the rows that a query needs, attend to them alone."""

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import Mass
from sparseattn.core.selection import Bounds, Selection, Tail, Weighed
from sparseattn.evaluation.replay import Evaluation, evaluate
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.attend.merge import merge
from sparseattn.kernels.attend_quantized.dispatch import attend_coded
from sparseattn.kernels.attend_quantized.reference import CodedRows
from sparseattn.selectors.base import Rows, Selector
from sparseattn.selectors.baselines.exact import Exact
from sparseattn.selectors.baselines.pagemass import PageMass
from sparseattn.selectors.baselines.random import Random
from sparseattn.selectors.baselines.recent import Recent
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.clusters.kmeans import KMeans
from sparseattn.selectors.clusters.moments import Moments
from sparseattn.selectors.clusters.retroinfer import RetroInfer
from sparseattn.selectors.clusters.saap import SAAP, PerfectBuckets
from sparseattn.selectors.combined.fitted import Fitted
from sparseattn.selectors.combined.freekv import FreeKV
from sparseattn.selectors.combined.kascade import Kascade
from sparseattn.selectors.combined.tailed import Tailed
from sparseattn.selectors.combined.topp import TopP
from sparseattn.selectors.combined.twostage import TwoStage
from sparseattn.selectors.combined.vattention import VAttention
from sparseattn.selectors.eviction.h2o import H2O
from sparseattn.selectors.eviction.pyramidkv import PyramidKV
from sparseattn.selectors.eviction.snapkv import SnapKV
from sparseattn.selectors.eviction.tova import TOVA
from sparseattn.selectors.graphs.bridge import QueryBridge
from sparseattn.selectors.graphs.faiss_indexes import HNSW, IVF, Flat
from sparseattn.selectors.graphs.retrieval import RetrievalAttention
from sparseattn.selectors.graphs.robustvamana import RobustVamana
from sparseattn.selectors.hashing.kdeformer import KDEformer
from sparseattn.selectors.hashing.magicpig import MagicPIG
from sparseattn.selectors.hashing.reformer import Reformer
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.pages.clse import Clse
from sparseattn.selectors.pages.ellipsoid import Ellipsoid
from sparseattn.selectors.pages.infllm import InfLLM
from sparseattn.selectors.pages.levels import Levels
from sparseattn.selectors.pages.mean import Mean
from sparseattn.selectors.pages.quad import Quad
from sparseattn.selectors.pages.quest import Quest
from sparseattn.selectors.pages.unique import Unique
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.selectors.tokens.doublesparsity import DoubleSparsity
from sparseattn.selectors.tokens.fier import Fier
from sparseattn.selectors.tokens.infinigen import InfiniGen
from sparseattn.selectors.tokens.loki import Loki
from sparseattn.selectors.tokens.lowbit import LowBit
from sparseattn.selectors.tokens.pariskv import ParisKV
from sparseattn.selectors.tokens.pq import PQ
from sparseattn.selectors.tokens.pqcache import PQCache
from sparseattn.selectors.tokens.rocketkv import RocketKV
from sparseattn.selectors.tokens.selfindex import SelfIndex
from sparseattn.selectors.tokens.sparq import SparQ

__version__ = "0.1.0"

__all__ = [
    "H2O",
    "HNSW",
    "IVF",
    "PQ",
    "SAAP",
    "SELECTORS",
    "TOVA",
    "Bounds",
    "Clse",
    "CodedRows",
    "DoubleSparsity",
    "Ellipsoid",
    "Evaluation",
    "Exact",
    "Fier",
    "Fitted",
    "Flat",
    "FreeKV",
    "InfLLM",
    "InfiniGen",
    "KDEformer",
    "KMeans",
    "KVCache",
    "Kascade",
    "Levels",
    "Loki",
    "LowBit",
    "MagicPIG",
    "Mass",
    "Mean",
    "Moments",
    "PQCache",
    "PageMass",
    "PageSelector",
    "ParisKV",
    "PerfectBuckets",
    "PyramidKV",
    "Quad",
    "QueryBridge",
    "Quest",
    "Random",
    "Recent",
    "Reformer",
    "RetrievalAttention",
    "RetroInfer",
    "RobustVamana",
    "RocketKV",
    "Rows",
    "Selection",
    "Selector",
    "SelfIndex",
    "SnapKV",
    "SparQ",
    "Tail",
    "Tailed",
    "TopP",
    "TwoStage",
    "Unique",
    "VAttention",
    "Weighed",
    "Window",
    "attend",
    "attend_coded",
    "decode",
    "evaluate",
    "make_selector",
    "merge",
]
