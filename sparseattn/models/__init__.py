"""Models of Hugging Face transformers: loaded, captured, and decoded sparsely by a `SparseCache`.

`sparse_cache.py` is the cache that `generate` is given; `model_hooks.py` and `attention_routing.py` are how it hooks
into a model, and `sparse_layer.py` is one layer of it. It may use `cache`, `roles`, `traces` and what lies below them.
`import sparseattn` never imports it.
"""
