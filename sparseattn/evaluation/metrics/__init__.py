"""The metrics of public long-context benchmarks, one module a benchmark, each equal to the benchmark's own code."""
