"""Metrics of public benchmarks: equal to the benchmarks' own code, from scores that were computed with it once."""
