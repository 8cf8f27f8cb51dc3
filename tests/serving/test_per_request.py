"""What a request asks of its decoding goes through the middleware, and what it read comes back in its usage."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparseattn.serving.vllm import counters, per_request
from sparseattn.serving.vllm.middleware import PerRequest

SETTINGS = {"selector": "quest:page=32", "budget": 512}


class Upstream:
    """vLLM's application: it keeps what it is asked, counts something for the ticket, and replies in so many parts."""

    def __init__(self, reply: list[bytes], kind: bytes = b"application/json") -> None:
        self.reply, self.kind = reply, kind
        self.body: Any = None
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        self.body, self.headers = message["body"], dict(scope["headers"])
        try:
            ticket = json.loads(self.body).get("vllm_xargs", {}).get(per_request.TICKET)
        except (ValueError, AttributeError, RecursionError):
            ticket = None
        if ticket is not None:
            per_request.of_process().add(ticket, 2, 300, 900)
            per_request.of_process().add(ticket, 1, 100, 450)
        headers = [(b"content-type", self.kind), (b"content-length", b"%d" % sum(map(len, self.reply)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in self.reply:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(counters.FOLDER, str(tmp_path))
    monkeypatch.setattr(per_request, "_own", None)


def posted(
    upstream: Upstream, body: bytes, settings: dict[str, Any] | None = SETTINGS, path: str = "", device: str = "cpu"
) -> Any:
    """Status, headers and bodies of what comes of a request in two parts."""
    config = SimpleNamespace(
        additional_config=None if settings is None else {"sparseattn": settings},
        device_config=SimpleNamespace(device_type=device),
    )
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    half = len(body) // 2
    coming = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]
    came: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        came.append(message)

    headers = [(b"content-type", b"application/json"), (b"Content-Length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path or "/v1/completions", "headers": headers, "app": app}
    asyncio.run(PerRequest(upstream)(scope, receive, send))
    start, *parts = came
    return start["status"], dict(start["headers"]), [part["body"] for part in parts]


def test_a_whole_reply_says_what_its_request_read() -> None:
    upstream = Upstream([b'{"choices":[{"text":"\xc3\xa9"}],', b'"usage":{"prompt_tokens":4}}'])
    asked = {"prompt": "a", "sparseattn": {"budget": 64}, "vllm_xargs": {"own": 1}}
    status, headers, parts = posted(upstream, json.dumps(asked).encode())
    body = b"".join(parts)
    said = json.loads(body)
    assert status == 200
    assert int(headers[b"content-length"]) == len(body)
    assert said["usage"] == {
        "prompt_tokens": 4,
        "sparseattn": {"sparse_tokens": 3, "rows_read": 400, "rows_held": 1350},
    }
    assert said["choices"] == [{"text": "é"}]
    passed = json.loads(upstream.body)
    assert int(upstream.headers[b"content-length"]) == len(upstream.body)
    assert passed["vllm_xargs"].pop(per_request.TICKET) > 0
    assert passed == {"prompt": "a", "vllm_xargs": {"own": 1, per_request.BUDGET: 64}}


def test_a_stream_says_it_in_the_event_with_its_usage() -> None:
    events = [
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":4}}\n\ndata: [DONE]\n\n',
    ]
    upstream = Upstream(events, b"text/event-stream; charset=utf-8")
    _, _, parts = posted(upstream, b'{"sparseattn": {"dense": true}}')
    assert parts[0] == events[0]
    first, done, nothing = parts[1].split(b"\n\n")
    assert json.loads(first[6:])["usage"]["sparseattn"]["rows_read"] == 400
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert json.loads(upstream.body)["vllm_xargs"][per_request.DENSE] == 1


@pytest.mark.parametrize(
    ("asked", "changed", "said"),
    [
        ({"budget": 16}, {}, '"sparseattn": budget is 32 rows or more here, got 16'),
        ({"budget": "many"}, {}, "budget is a whole number from 1"),
        ({"budget": True}, {}, "budget is a whole number from 1"),
        ({"budget": 64, "dense": True}, {}, "give budget or dense"),
        ({"rows": 64}, {}, "has budget, dense, got 'rows'"),
        ("dense", {}, "is an object, got 'dense'"),
        ({"budget": 64}, {"per_request": False}, "started with --no-per-request"),
        ({"budget": 64}, {"selector": "window"}, "reads the same rows at every budget"),
        ({"budget": 257}, {"max_budget": 256}, "budget is 256 rows or less here (--max-budget), got 257"),
        ({"dense": True}, {"max_budget": 256}, "a budget of 256 rows at most (--max-budget), and a dense one reads"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(asked: Any, changed: dict[str, Any], said: str) -> None:
    upstream = Upstream([b"{}"])
    status, _, parts = posted(upstream, json.dumps({"sparseattn": asked}).encode(), {**SETTINGS, **changed})
    assert status == 400
    assert said in json.loads(parts[0])["error"]["message"]
    assert upstream.body is None


@pytest.mark.parametrize(
    ("arguments", "changed", "said"),
    [
        ({per_request.BUDGET: 16}, {}, "budget is 32 rows or more here, got 16"),
        ({per_request.BUDGET: 1 << 40}, {"max_budget": 256}, "budget is 256 rows or less here"),
        ({per_request.DENSE: 1}, {"max_budget": 256}, "and a dense one reads every row"),
        ({per_request.DENSE: 1}, {"per_request": False}, "started with --no-per-request"),
    ],
)
def test_vllms_own_names_are_held_to_the_same_rules(arguments: Any, changed: dict[str, Any], said: str) -> None:
    upstream = Upstream([b"{}"])
    status, _, parts = posted(upstream, json.dumps({"vllm_xargs": arguments}).encode(), {**SETTINGS, **changed})
    assert status == 400
    assert said in json.loads(parts[0])["error"]["message"]
    assert upstream.body is None
    status, _, _ = posted(upstream, b'{"vllm_xargs": {"sparseattn_budget": 64, "own": 1}}')
    assert status == 200
    passed = json.loads(upstream.body)["vllm_xargs"]
    assert passed.pop(per_request.TICKET) > 0
    assert passed == {per_request.BUDGET: 64, "own": 1}


def test_a_budget_up_to_the_largest_is_passed_on() -> None:
    upstream = Upstream([b"{}"])
    status, _, _ = posted(upstream, b'{"sparseattn": {"budget": 256}}', {**SETTINGS, "max_budget": 256})
    assert status == 200
    assert json.loads(upstream.body)["vllm_xargs"][per_request.BUDGET] == 256


@pytest.mark.parametrize(
    "body", [b'{"sparseattn": {"budget": 64}}', b'{"sparseattn": {}}', b'{"vllm_xargs": {"sparseattn_dense": 1}}']
)
@pytest.mark.parametrize("path", ["", "/v1/responses"])
def test_on_cuda_a_request_that_chooses_is_refused(body: bytes, path: str) -> None:
    upstream = Upstream([b"{}"])
    status, _, parts = posted(upstream, body, path=path, device="cuda")
    assert status == 400
    assert "requests choose on CPUs alone, and this server runs on cuda" in json.loads(parts[0])["error"]["message"]
    assert upstream.body is None


def test_on_cuda_a_usage_counts_nothing_that_nobody_counted() -> None:
    upstream = Upstream([b'{"usage":{"prompt_tokens":4}}'])
    status, _, parts = posted(upstream, b'{"prompt": "a"}', device="cuda")
    assert (status, upstream.body) == (200, b'{"prompt": "a"}')
    assert b"".join(parts) == b'{"usage":{"prompt_tokens":4}}'


def test_a_server_without_requests_of_their_own_still_counts() -> None:
    upstream = Upstream([b'{"usage":{}}'])
    _, _, parts = posted(upstream, b'{"prompt": "a"}', {**SETTINGS, "per_request": False})
    assert json.loads(parts[0])["usage"]["sparseattn"]["sparse_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "settings", "path"),
    [
        (b'{"prompt": "a"}', None, ""),
        (b"no json", SETTINGS, ""),
        (b"[1, 2]", SETTINGS, ""),
        (b'{"vllm_xargs": [1]}', SETTINGS, ""),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", SETTINGS, ""),
        (b'{"prompt": "a"}', SETTINGS, "/v1/responses"),
    ],
)
def test_what_is_not_ours_goes_through_as_it_is(body: bytes, settings: dict[str, Any] | None, path: str) -> None:
    upstream = Upstream([b'{"usage":', b'{"prompt_tokens": 1}}'])
    _, headers, parts = posted(upstream, body, settings, path)
    assert upstream.body == body
    assert b"".join(parts) == b'{"usage":{"prompt_tokens": 1}}'
    assert int(headers[b"content-length"]) == 30


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_what_is_not_passed_on_is_refused(path: str) -> None:
    upstream = Upstream([b"{}"])
    status, _, parts = posted(upstream, b'{"sparseattn": {"budget": 64}}', path=path)
    assert status == 400
    assert "is read at /v1/completions and /v1/chat/completions" in json.loads(parts[0])["error"]["message"]
    assert upstream.body is None


def test_counts_have_their_bytes_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a disk that fills up ends no step; one that is full is said at the start."""
    per_request.of_process()
    (file,) = tmp_path.glob("*.requests")
    assert file.stat().st_blocks * 512 >= file.stat().st_size

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: counts of what is served take 56 KiB: '.*\.counts'"):
        counters.Counter()


def test_only_rightful_arguments_are_followed() -> None:
    """Those of a server without the middleware come unchecked."""
    given: list[Any] = [None, {per_request.BUDGET: 64}, {per_request.BUDGET: 8}, {per_request.BUDGET: "64"}]
    given += [{per_request.BUDGET: (1 << 64) - 1}]  # vLLM hands on what fits its messages
    given += [{per_request.DENSE: 1, per_request.TICKET: 7}, {per_request.DENSE: 2, per_request.TICKET: -1}]
    asked = per_request.request_choices(given, 32, True)
    assert asked is not None
    np.testing.assert_array_equal(asked.budgets, [-1, 64, -1, -1, per_request.MOST, -1, -1])
    np.testing.assert_array_equal(asked.dense, [False, False, False, False, False, True, False])
    np.testing.assert_array_equal(asked.tickets, [0, 0, 0, 0, 0, 7, 0])
    fixed = per_request.request_choices(given, 32, False)
    assert fixed is not None
    assert not fixed.dense.any()
    assert (fixed.budgets == -1).all()
    assert per_request.request_choices([None, {}], 32, True) is None
    limited = per_request.request_choices([{per_request.BUDGET: 64}, {per_request.BUDGET: 65}, given[5]], 32, True, 64)
    assert limited is not None
    np.testing.assert_array_equal(limited.budgets, [64, -1, -1])
    assert not limited.dense.any()


def test_a_later_request_takes_a_place_and_the_earlier_ones_count_is_gone() -> None:
    counts = per_request.of_process()
    counts.add(5, 1, 10, 20)
    counts.add(5 + per_request.SLOTS, 1, 7, 8)
    assert per_request.said(5 + per_request.SLOTS) == {"sparse_tokens": 1, "rows_read": 7, "rows_held": 8}
    assert per_request.said(5) == {"sparse_tokens": 0, "rows_read": 0, "rows_held": 0}
