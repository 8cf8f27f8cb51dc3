"""Layouts of public benchmarks: lines of ours in the form of each become its prompts, or are refused."""
