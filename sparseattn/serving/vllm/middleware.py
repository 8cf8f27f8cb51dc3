"""A layer around vLLM's API: what a request asks of its decoding goes in, and what it read comes out in its `usage`.

`sparseattn serve` puts it there; with vLLM's own command it is
`--middleware sparseattn.serving.vllm.middleware.PerRequest`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sparseattn.serving.vllm import per_request
from sparseattn.serving.vllm.settings import Settings, configured

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
PATHS = ("/v1/completions", "/v1/chat/completions")
OTHER_PATHS = ("/v1/responses", "/v1/messages")  # which generate too: what a request asks is not passed on there
XARGS = "vllm_xargs"


class PerRequest:
    """An ASGI application around vLLM's.

    Args:
        app: what it is around.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        first = time.time_ns() // 1_000_000 << 20 ^ os.getpid() % 1024 << 10  # apart from those of an earlier start
        self._tickets = itertools.count(first % (1 << 53))
        self._settings: list[tuple[Settings | None, str]] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if not posted or not scope["path"].endswith(PATHS + OTHER_PATHS):
            await self.app(scope, receive, send)
            return
        body, last = await _whole(receive)
        if last is not None:  # the client went away
            await self.app(scope, _replayed(body, receive, last), send)
            return
        settings, device = self._of(scope)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):  # vLLM says what is wrong
            given = None
        if settings is None or not isinstance(given, dict):
            await self.app(scope, _replayed(body, receive), send)
            return
        elsewhere = scope["path"].endswith(OTHER_PATHS)
        if elsewhere and device == "cpu" and per_request.KEY in given:
            await _refused(send, f'"{per_request.KEY}" is read at {" and ".join(PATHS)}: leave it out here')
            return
        more = {} if given.get(XARGS) is None else given[XARGS]
        try:
            wanted = _wanted(given, more, settings, device)
        except ValueError as error:
            await _refused(send, str(error))
            return
        if elsewhere or device != "cpu" or not isinstance(more, dict):  # of which vLLM says what is wrong
            await self.app(scope, _replayed(body, receive), send)
            return
        given.pop(per_request.KEY, None)
        ticket = next(self._tickets)
        others = {name: value for name, value in more.items() if name not in per_request.ASKS}
        given[XARGS] = {**others, **wanted, per_request.TICKET: ticket}
        try:
            body = json.dumps(given).encode()
        except RecursionError:
            await _refused(send, "the body is nested too deeply")
            return
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self.app(scope, _replayed(body, receive), _Reply(send, ticket))

    def _of(self, scope: Message) -> tuple[Settings | None, str]:
        """Return the engine's settings, None where it is stock vLLM, and the type of its device."""
        if not self._settings:
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            device = getattr(getattr(config, "device_config", None), "device_type", "cpu")
            self._settings.append((configured(getattr(config, "additional_config", None)), device))
        return self._settings[0]


def _wanted(given: dict[str, Any], more: Any, settings: Settings, device: str) -> dict[str, int]:
    """Return what a request's body `given` asks, by its own field or among `more`, vLLM's; {} where it asks nothing.

    Raises:
        ValueError: see `per_request.checked`.
    """
    asked = per_request.asked_by(more) if isinstance(more, dict) else {}
    if per_request.KEY in given:
        asked = given[per_request.KEY]
    elif not asked:
        return {}
    return per_request.checked(
        asked, settings.shape[0], settings.per_request, any(made.uses_budget for made in settings.each()),
        settings.max_budget, device,
    )  # fmt: skip


class _Reply:
    """Sends a reply on, with what its request read in its usage.

    Args:
        send: the server's.
        ticket: of the request.
    """

    def __init__(self, send: Send, ticket: int) -> None:
        self._send, self._ticket = send, ticket
        self._start: Message | None = None
        self._held: list[bytes] = []
        self._streamed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kinds = {name.lower(): value for name, value in message["headers"]}
            self._streamed = not kinds.get(b"content-type", b"").startswith(b"application/json")
            if self._streamed:
                await self._send(message)
            else:
                self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._streamed:
            await self._send({**message, "body": self._event(message.get("body", b""))})
        else:
            self._held.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._whole()

    async def _whole(self) -> None:
        assert self._start is not None
        body = self._counted(b"".join(self._held))
        headers = [pair for pair in self._start["headers"] if pair[0].lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _event(self, body: bytes) -> bytes:
        """Events of a stream, of which vLLM sends whole ones; that with the usage is the last but `[DONE]`."""
        if b'"usage":{' not in body:
            return body
        events = body.split(b"\n\n")
        return b"\n\n".join(
            b"data: " + self._counted(event[6:]) if event.startswith(b"data: {") else event for event in events
        )

    def _counted(self, text: bytes) -> bytes:
        try:
            said = json.loads(text)
        except ValueError:
            return text
        if not isinstance(said, dict) or not isinstance(said.get("usage"), dict):
            return text  # an error, or a stream's event without one
        said["usage"][per_request.KEY] = per_request.said(self._ticket)
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


async def _whole(receive: Receive) -> tuple[bytes, Message | None]:
    """Return a request's body, and the message that came in place of its end, if one did."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), None


def _replayed(body: bytes, receive: Receive, last: Message | None = None) -> Receive:
    """Return what gives a body that was read already, and then what comes."""
    coming: list[Message] = [{"type": "http.request", "body": body, "more_body": last is not None}]
    coming += [] if last is None else [last]

    async def receive_again() -> Message:
        return coming.pop(0) if coming else await receive()

    return receive_again


async def _refused(send: Send, why: str) -> None:
    said = {"error": {"message": why, "type": "BadRequestError", "param": per_request.KEY, "code": 400}}
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
