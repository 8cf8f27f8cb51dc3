"""Query-aware sparse attention for long-context decoding: select the rows that a query needs, attend to them alone.

`selectors` are the methods, `kernels` the compiled operations, `cache` stores and decodes, `models` hooks transformers,
`serving` hooks vLLM, `evaluation` measures, `recommend` plans, `reporting` shows, and `cli` is the command.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparseattn.selectors.methods import METHODS

if TYPE_CHECKING:  # what is exported is imported when it is asked for, so that `sparseattn --help` needs no torch
    from sparseattn.cache.decode import decode as decode
    from sparseattn.cache.kv_cache import KVCache as KVCache
    from sparseattn.cache.ranks import Ranks as Ranks
    from sparseattn.codecs.base import RowCodec as RowCodec
    from sparseattn.codecs.registry import ROW_CODECS as ROW_CODECS
    from sparseattn.codecs.registry import make_codec as make_codec
    from sparseattn.core.budget import Mass as Mass
    from sparseattn.core.context import LayerContext as LayerContext
    from sparseattn.core.context import StepContext as StepContext
    from sparseattn.core.selection import Bounds as Bounds
    from sparseattn.core.selection import Selection as Selection
    from sparseattn.core.selection import Tail as Tail
    from sparseattn.core.selection import Weighed as Weighed
    from sparseattn.core.step_cost import Scan as Scan
    from sparseattn.evaluation.replay import evaluate as evaluate
    from sparseattn.evaluation.result import Evaluation as Evaluation
    from sparseattn.kernels.attend.dispatch import attend as attend
    from sparseattn.kernels.attend.merge import merge as merge
    from sparseattn.kernels.attend_quantized.dispatch import attend_coded as attend_coded
    from sparseattn.kernels.attend_quantized.reference import CodedRows as CodedRows
    from sparseattn.selectors.base import Rows as Rows
    from sparseattn.selectors.base import Selector as Selector
    from sparseattn.selectors.baselines.exact import Exact as Exact
    from sparseattn.selectors.baselines.pagemass import PageMass as PageMass
    from sparseattn.selectors.baselines.random import Random as Random
    from sparseattn.selectors.baselines.razor import RazorAttention as RazorAttention
    from sparseattn.selectors.baselines.recent import Recent as Recent
    from sparseattn.selectors.baselines.window import Window as Window
    from sparseattn.selectors.clusters.kmeans import KMeans as KMeans
    from sparseattn.selectors.clusters.louver import Louver as Louver
    from sparseattn.selectors.clusters.moments import Moments as Moments
    from sparseattn.selectors.clusters.retroinfer import RetroInfer as RetroInfer
    from sparseattn.selectors.clusters.saap import SAAP as SAAP
    from sparseattn.selectors.clusters.saap import PerfectBuckets as PerfectBuckets
    from sparseattn.selectors.combined.delta import Delta as Delta
    from sparseattn.selectors.combined.fitted import Fitted as Fitted
    from sparseattn.selectors.combined.freekv import FreeKV as FreeKV
    from sparseattn.selectors.combined.indexcache import IndexCache as IndexCache
    from sparseattn.selectors.combined.kascade import Kascade as Kascade
    from sparseattn.selectors.combined.lessismore import LessIsMore as LessIsMore
    from sparseattn.selectors.combined.tailed import Tailed as Tailed
    from sparseattn.selectors.combined.topp import TopP as TopP
    from sparseattn.selectors.combined.twostage import TwoStage as TwoStage
    from sparseattn.selectors.combined.vattention import VAttention as VAttention
    from sparseattn.selectors.eviction.a2sf import A2SF as A2SF
    from sparseattn.selectors.eviction.cam import CaM as CaM
    from sparseattn.selectors.eviction.d2o import D2O as D2O
    from sparseattn.selectors.eviction.elasticcache import ElasticCache as ElasticCache
    from sparseattn.selectors.eviction.fastgen import FastGen as FastGen
    from sparseattn.selectors.eviction.h2o import H2O as H2O
    from sparseattn.selectors.eviction.keyformer import Keyformer as Keyformer
    from sparseattn.selectors.eviction.kvmerger import KVMerger as KVMerger
    from sparseattn.selectors.eviction.locret import Locret as Locret
    from sparseattn.selectors.eviction.pyramidkv import PyramidKV as PyramidKV
    from sparseattn.selectors.eviction.scissorhands import Scissorhands as Scissorhands
    from sparseattn.selectors.eviction.snapkv import SnapKV as SnapKV
    from sparseattn.selectors.eviction.tova import TOVA as TOVA
    from sparseattn.selectors.eviction.zipcache import ZipCache as ZipCache
    from sparseattn.selectors.graphs.bridge import QueryBridge as QueryBridge
    from sparseattn.selectors.graphs.faiss_indexes import HNSW as HNSW
    from sparseattn.selectors.graphs.faiss_indexes import IVF as IVF
    from sparseattn.selectors.graphs.faiss_indexes import Flat as Flat
    from sparseattn.selectors.graphs.retrieval import RetrievalAttention as RetrievalAttention
    from sparseattn.selectors.graphs.robustvamana import RobustVamana as RobustVamana
    from sparseattn.selectors.hashing.kdeformer import KDEformer as KDEformer
    from sparseattn.selectors.hashing.magicpig import MagicPIG as MagicPIG
    from sparseattn.selectors.hashing.reformer import Reformer as Reformer
    from sparseattn.selectors.pages.base import PageSelector as PageSelector
    from sparseattn.selectors.pages.clse import Clse as Clse
    from sparseattn.selectors.pages.ellipsoid import Ellipsoid as Ellipsoid
    from sparseattn.selectors.pages.infllm import InfLLM as InfLLM
    from sparseattn.selectors.pages.infllm2 import InfLLM2 as InfLLM2
    from sparseattn.selectors.pages.levels import Levels as Levels
    from sparseattn.selectors.pages.mean import Mean as Mean
    from sparseattn.selectors.pages.quad import Quad as Quad
    from sparseattn.selectors.pages.quest import Quest as Quest
    from sparseattn.selectors.pages.seer import Seer as Seer
    from sparseattn.selectors.pages.shadowkv import ShadowKV as ShadowKV
    from sparseattn.selectors.pages.skipsoftmax import SkipSoftmax as SkipSoftmax
    from sparseattn.selectors.pages.unique import Unique as Unique
    from sparseattn.selectors.registry import SELECTORS as SELECTORS
    from sparseattn.selectors.registry import make_selector as make_selector
    from sparseattn.selectors.tokens.a2ats import A2ATS as A2ATS
    from sparseattn.selectors.tokens.adamas import Adamas as Adamas
    from sparseattn.selectors.tokens.doublesparsity import DoubleSparsity as DoubleSparsity
    from sparseattn.selectors.tokens.fier import Fier as Fier
    from sparseattn.selectors.tokens.hashattention import HashAttention as HashAttention
    from sparseattn.selectors.tokens.hata import Hata as Hata
    from sparseattn.selectors.tokens.indexer import Indexer as Indexer
    from sparseattn.selectors.tokens.infinigen import InfiniGen as InfiniGen
    from sparseattn.selectors.tokens.loki import Loki as Loki
    from sparseattn.selectors.tokens.lowbit import LowBit as LowBit
    from sparseattn.selectors.tokens.pariskv import ParisKV as ParisKV
    from sparseattn.selectors.tokens.pillar import Pillar as Pillar
    from sparseattn.selectors.tokens.pq import PQ as PQ
    from sparseattn.selectors.tokens.pqcache import PQCache as PQCache
    from sparseattn.selectors.tokens.querypq import QueryPQ as QueryPQ
    from sparseattn.selectors.tokens.rocketkv import RocketKV as RocketKV
    from sparseattn.selectors.tokens.selfindex import SelfIndex as SelfIndex
    from sparseattn.selectors.tokens.sparq import SparQ as SparQ

__version__ = "0.1.0"

# Exported name -> the module that it comes from; methods with a name come from where their row says.
_MODULES = {
    "Bounds": "sparseattn.core.selection",
    "CodedRows": "sparseattn.kernels.attend_quantized.reference",
    "Evaluation": "sparseattn.evaluation.result",
    "Fitted": "sparseattn.selectors.combined.fitted",
    "KVCache": "sparseattn.cache.kv_cache",
    "LayerContext": "sparseattn.core.context",
    "Levels": "sparseattn.selectors.pages.levels",
    "Mass": "sparseattn.core.budget",
    "PageSelector": "sparseattn.selectors.pages.base",
    "PerfectBuckets": "sparseattn.selectors.clusters.saap",
    "ROW_CODECS": "sparseattn.codecs.registry",
    "Ranks": "sparseattn.cache.ranks",
    "RowCodec": "sparseattn.codecs.base",
    "Rows": "sparseattn.selectors.base",
    "SELECTORS": "sparseattn.selectors.registry",
    "Scan": "sparseattn.core.step_cost",
    "Selection": "sparseattn.core.selection",
    "Selector": "sparseattn.selectors.base",
    "StepContext": "sparseattn.core.context",
    "Tail": "sparseattn.core.selection",
    "Weighed": "sparseattn.core.selection",
    "attend": "sparseattn.kernels.attend.dispatch",
    "attend_coded": "sparseattn.kernels.attend_quantized.dispatch",
    "decode": "sparseattn.cache.decode",
    "evaluate": "sparseattn.evaluation.replay",
    "make_codec": "sparseattn.codecs.registry",
    "make_selector": "sparseattn.selectors.registry",
    "merge": "sparseattn.kernels.attend.merge",
    **{method.kind: method.module for method in METHODS.values()},
}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker would take it to have every name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
