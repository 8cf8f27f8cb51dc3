"""RULER's own tasks, made by its rules (https://arxiv.org/abs/2404.06654)."""
