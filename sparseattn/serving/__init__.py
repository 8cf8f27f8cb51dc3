"""Servers: the vLLM plug-in, and a client of OpenAI's protocol.

It may use `models` and what lies below them.
"""
