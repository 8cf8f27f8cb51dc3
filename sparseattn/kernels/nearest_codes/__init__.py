"""Names of the nearest of 16 centroids, two a byte."""
