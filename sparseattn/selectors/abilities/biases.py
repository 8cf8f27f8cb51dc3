"""Methods whose selections have a bias, so that a sample stands for what it was drawn from."""

from __future__ import annotations


class Biases:
    """A method that sets `Selection.bias`, which is added to the logits of the rows named.

    A class says so in its bases, so that whoever takes its rows knows: a bias is right for all of a sample alone.
    """
