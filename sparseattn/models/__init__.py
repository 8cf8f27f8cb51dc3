"""Models of Hugging Face transformers: loaded, captured, and decoded sparsely by a `SparseCache`.

`sparse_cache.py` is the cache that `generate` is given. `attention_routing.py` registers its attention function, and
`model_hooks.py` answers the calls. `sparse_layer.py` is one layer of it, and `sparse_heads.py` the KV heads of a layer
that share a method. It may use `cache`, `roles`, `traces` and what lies below them. `import sparseattn` never imports
it.
"""
