"""The KV cache that a selector chooses from, in zones, exact or quantized, and `decode`, one step over it.

`kv_cache.py` is `KVCache`, `decode.py` seals, selects and attends. It may use `selectors` and what lies below them.
"""
