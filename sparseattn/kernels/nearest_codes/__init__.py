"""Names of the nearest centroids of keys' parts, of keys that may be turned first."""
