"""A token's key and value, written behind those that a cache holds."""
