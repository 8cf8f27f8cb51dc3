"""Keys rounded to a few bits (`keys.QuantizedKeys`): how they lie in memory, and scores by them."""
