"""What a server of `sparseattn serve` counts, read from its `/metrics`."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request

from sparseattn.core.activity import NAMES, Activity, LayerActivity

SECONDS = 60
MOST = 16 << 20  # bytes of a page of metrics
LINE = re.compile(r'^sparseattn_(\w+?)_total\{(?:[^}]*,)?layer="(\d+)"[^}]*\} ([0-9.eE+]+)$', re.M)
FAMILY = re.compile(r"^# TYPE sparseattn_\w+ counter$", re.M)


class MetricsError(ValueError):
    """A server that does not say what it counts."""


def address_of_metrics(url: str) -> str:
    """Return where the server of a URL, such as `http://127.0.0.1:8000/v1/completions`, shows its counters."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise MetricsError(f"a server's address is a URL such as http://127.0.0.1:8000/v1/completions, got {url!r}")
    before = parts.path.partition("/v1")[0].rstrip("/")
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"{before}/metrics", "", ""))


def served_activity(url: str) -> Activity:
    """Return what the server of a URL has counted since it started.

    Raises:
        MetricsError: out of reach, or a server that has no counters of this package.
    """
    where = address_of_metrics(url)
    try:
        with urllib.request.urlopen(where, timeout=SECONDS) as reply:
            text = reply.read(MOST + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:  # an HTTP status among them
        raise MetricsError(f"the counters of the server cannot be read at {where}: {error}") from error
    if len(text) > MOST:
        raise MetricsError(f"{where} has more than {MOST >> 20} MiB, which is no page of counters")
    return parsed(text.decode("utf-8", "replace"), where)


def parsed(text: str, where: str) -> Activity:
    """Return the counts on a page of metrics; MetricsError where it has none of ours."""
    if FAMILY.search(text) is None:
        raise MetricsError(
            f"{where} has no counters sparseattn_*: the server decodes by its own attention, or without this package; "
            f"start it with `sparseattn serve`"
        )
    by_layer: dict[int, dict[str, int]] = {}
    for name, layer, value in LINE.findall(text):
        if name in NAMES:
            by_layer.setdefault(int(layer), {})[name] = int(float(value))
    return Activity({layer: LayerActivity(**counts) for layer, counts in sorted(by_layer.items())})
