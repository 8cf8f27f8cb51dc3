"""The classes of transformers that ours extend, or a sentence that says how to get them."""

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError("a SparseCache needs transformers: pip install 'sparseattn[transformers]'") from error

__all__ = ["Cache", "CacheLayerMixin", "DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"]
