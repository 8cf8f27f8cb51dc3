"""Graph indexes on keys: built and searched by numba's code, with the RoarGraph and Vamana constructions."""
