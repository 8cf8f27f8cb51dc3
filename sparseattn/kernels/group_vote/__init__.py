"""The vote of a query group: one choice per KV head of what its query heads score."""
