"""Names of the centroids whose sum is nearest to a key, one of each codebook."""
