"""What happens in an engine that is not as the plug-in knows it: it refuses to start, or serves as stock vLLM."""

from __future__ import annotations

import logging

from sparseattn.serving.vllm import counters, installed
from sparseattn.serving.vllm.defaults import STOCK

logger = logging.getLogger("vllm.sparseattn")


_said: set[str] = set()  # what this process has logged


class Mismatch(ValueError):
    """An engine that is not as the plug-in knows it."""


def met(how: str, why: Exception) -> None:
    """Serve as stock from now on, logged and counted, where `how` is "stock".

    Raises:
        Mismatch: where it is not.
    """
    name, version = installed.distribution() or ("vllm", "of no known version")
    said = (
        f"{name} {version} is not as sparseattn knows vLLM ({told(why)}), so that it cannot decode sparsely here: "
        f"install vLLM {installed.WINDOW}, or start without sparseattn"
    )
    if how != STOCK:
        raise Mismatch(f"{said}, or with --on-mismatch {STOCK}") from why
    if said not in _said:  # every layer of an engine may come here
        _said.add(said)
        logger.error("sparseattn: %s. Served as stock vLLM, as --on-mismatch %s says", said, STOCK, exc_info=why)
    counters.add_mismatch(said)


def warn_if_newer() -> None:
    """Warns of a vLLM that is newer than all that were tried, whose self-test has passed."""
    if newer := installed.newer_than_tried():
        logger.warning("sparseattn: %s. Its self-test has passed, so it is served", newer)


def warn_unfit(why: Exception) -> None:
    """Warns of a vLLM into which the plug-in cannot be loaded, though nobody may have asked for it."""
    logger.warning("sparseattn cannot be loaded into this vLLM, which serves as it is (%s)", told(why))


def told(why: Exception) -> str:
    """Return what an exception says, in a line, with its kind where it is not meant for a user."""
    text = " ".join(str(why).split())
    return text if type(why) is ValueError else f"{type(why).__name__}: {text}"
