"""Traces: queries, keys and values of one prompt, read and written as safetensors, made synthetically or from texts.

It may use `core` and `utils`.
"""
