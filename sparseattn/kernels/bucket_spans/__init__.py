"""The visited buckets' rows as spans within the budget (SAAP)."""
