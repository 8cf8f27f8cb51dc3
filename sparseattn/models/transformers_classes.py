"""The classes of transformers that ours extend, or a sentence that says how to get them."""

try:
    from transformers import cache_utils
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
except ImportError as error:
    raise ImportError("a SparseCache needs transformers: pip install 'sparseattn[transformers]'") from error

# Keeps nothing, as its layer has another's keys or none; releases without it have no entry for such a layer.
KEEPS_NOTHING: type | None = getattr(cache_utils, "DummyLayer", None)

__all__ = [
    "KEEPS_NOTHING",
    "Cache",
    "CacheLayerMixin",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "StopStringCriteria",
    "StoppingCriteriaList",
]
