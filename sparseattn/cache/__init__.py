"""The KV cache that a selector chooses from, in zones, exact or quantized, and `decode`, one step over it.

`kv_cache.py` is `KVCache`, made of `rows.py`, which stores, `shown_rows.py`, which seals, and `search.py`, which asks
the selector. `decode.py` is one step. It may use `selectors` and what lies below them.
"""
