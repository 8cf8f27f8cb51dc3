"""Places drawn at random without replacement, at the cost of those drawn (random)."""
