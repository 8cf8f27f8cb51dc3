"""The files of public long-context benchmarks, one module a benchmark: lines as published become the prompts that its
code would build, each with its limit, its reference and the metric that scores it."""
