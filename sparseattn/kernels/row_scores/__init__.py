"""Products of query heads with every key."""
