"""The clients of `benchmarks.vllm_soak`: what they ask of a server, and what they see of its answers."""

from __future__ import annotations

import asyncio
import collections
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SHORTEST, LONGEST, POSITIONS = 50, 7000, 8192  # tokens of a prompt, and of a sequence
ANSWERS = 64  # tokens at most
VOCABULARY = 49_152
SECONDS = 600  # that an answer may take
KINDS = {"whole": 57, "streamed": 23, "given_up": 7, "left": 6, "bad": 7}  # of 100 requests
# What no server takes -> the status that says so. Of what only sparseattn knows, stock is given the second.
BAD: tuple[tuple[dict[str, Any], dict[str, Any], int], ...] = (
    ({"max_tokens": -1}, {}, 400),
    ({"temperature": -1}, {}, 400),
    ({"prompt": [5] * (POSITIONS + 1)}, {}, 400),
    ({"model": "another"}, {}, 404),
    ({"top_p": 2}, {}, 400),
    ({"sparseattn": {"budget": -5}}, {"temperature": "warm"}, 400),
    ({"sparseattn": {"colour": 1}}, {"n": 0}, 400),
)


@dataclass(frozen=True)
class Request:
    """One request, and what its client does.

    Args:
        kind: of `KINDS`.
        body: what is posted.
        after: pieces of the stream after which its client goes away.
        status: that the server should answer.
        wait: seconds after which the client of a plain request goes away without an answer; 0: it does not.
    """

    kind: str
    body: dict[str, Any]
    after: int = 0
    status: int = 200
    wait: float = 0.0


@dataclass
class Seen:
    """What the clients saw.

    Args:
        kinds: requests that ended as they should, by kind.
        wrong: how each of the others ended.
        usage: of answers that ended, summed: `completion_tokens`, and sparseattn's own.
    """

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    usage: collections.Counter[str] = field(default_factory=collections.Counter)


def made_requests(count: int, seed: int, stock: bool, kinds: dict[str, int]) -> Iterator[Request]:
    """Return requests, the same for both servers but for what stock does not know.

    Args:
        count: of requests.
        seed: of what is drawn.
        stock: leave out what only sparseattn knows.
        kinds: how many of a hundred are of which kind.
    """
    draw = random.Random(seed)
    known = [[draw.randrange(VOCABULARY) for _ in range(3000)] for _ in range(8)]
    for _ in range(count):
        length = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
        shared = draw.choice(known)[: length // 2] if draw.random() < 0.3 else []
        ids = shared + [draw.randrange(VOCABULARY) for _ in range(length - len(shared))]
        tokens = draw.randrange(1, ANSWERS + 1)
        body = {"model": "soak", "prompt": ids, "temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        asked = draw.choice([None, None, None, {"budget": 64}, {"budget": 1024}, {"dense": True}])
        if asked is not None and not stock:
            body["sparseattn"] = asked
        (kind,) = draw.choices(list(kinds), list(kinds.values()))
        after, wait = draw.randrange(min(12, tokens)), draw.uniform(0.01, 1.0)
        bad, of_stock, status = draw.choice(BAD)
        if kind == "bad":
            yield Request(kind, body | (of_stock or bad if stock else bad), status=status)
        elif kind == "whole":
            yield Request(kind, body)
        elif kind == "left":
            yield Request(kind, body, wait=wait)
        else:
            streamed = {"stream": True, "stream_options": {"include_usage": True}}
            yield Request(kind, body | streamed, after if kind == "given_up" else 0)


async def ask(client: httpx.AsyncClient, request: Request, seen: Seen) -> None:
    """Send one request, do what its client does, and note how it ended."""
    try:
        if "stream" not in request.body:
            try:
                reply = await asyncio.wait_for(client.post("/v1/completions", json=request.body), request.wait or None)
            except TimeoutError:
                if not request.wait:
                    raise
                seen.kinds[request.kind] += 1
                return
            status, usage = reply.status_code, reply.json().get("usage")
        else:
            async with client.stream("POST", "/v1/completions", json=request.body) as stream:
                status, usage, pieces = stream.status_code, None, 0
                async for line in stream.aiter_lines():
                    if request.kind == "given_up" and pieces >= request.after:
                        break
                    if line.startswith("data: {"):
                        pieces += 1
                        usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
        if status != request.status:
            raise ValueError(f"status {status} in place of {request.status}")
        if request.kind in ("whole", "streamed"):
            seen.usage.update(_counts(usage, request.body["max_tokens"]))
    except (httpx.HTTPError, ValueError, TimeoutError) as error:
        seen.wrong.append(f"{request.kind}: {type(error).__name__}: {error}")
    else:
        seen.kinds[request.kind] += 1


def _counts(usage: dict[str, Any] | None, tokens: int) -> dict[str, int]:
    """Return the counts of an answer's usage; ValueError where it has none, or not as many tokens as asked for."""
    if usage is None:
        raise ValueError("an answer without its usage")
    if usage["completion_tokens"] != tokens:
        raise ValueError(f"{usage['completion_tokens']} tokens in place of {tokens}")
    return {"completion_tokens": tokens, **(usage.get("sparseattn") or {})}


async def ask_all(url: str, requests: Sequence[Request], concurrency: int, say: Callable[[], None]) -> Seen:
    """Ask `concurrency` requests at a time, and call `say` behind each."""
    seen, waiting = Seen(), iter(requests)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:

        async def worker() -> None:
            for request in waiting:
                await ask(client, request, seen)
                say()

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return seen
