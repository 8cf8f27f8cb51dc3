"""`benchmarks.vllm_soak_clients`: both servers get the same requests, and what clients note is what a server does."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from benchmarks.vllm_soak_clients import BAD, KINDS, LONGEST, SHORTEST, Request, Seen, ask, made_requests

ANSWER = {"usage": {"completion_tokens": 3, "sparseattn": {"rows_read": 5}}}
PIECES = "".join(f"data: {json.dumps({'piece': number})}\n\n" for number in range(4))


def test_stock_is_asked_the_same_without_what_it_does_not_know() -> None:
    ours, stock = (list(made_requests(300, 0, stock, KINDS)) for stock in (False, True))
    assert {one.kind for one in ours} == set(KINDS)
    assert any("sparseattn" in one.body for one in ours)
    assert all(SHORTEST <= len(one.body["prompt"]) <= LONGEST for one in ours if one.kind != "bad")
    spelled = [{**bad, **of_stock} for bad, of_stock, _ in BAD]
    for mine, theirs in zip(ours, stock, strict=True):
        assert (mine.kind, mine.after, mine.status) == (theirs.kind, theirs.after, theirs.status)
        assert "sparseattn" not in theirs.body
        if mine.kind == "bad":
            assert any(one.items() <= {**mine.body, **theirs.body}.items() for one in spelled)
        else:
            assert theirs.body == {name: value for name, value in mine.body.items() if name != "sparseattn"}


def test_a_client_that_leaves_before_its_answer_ends_as_it_should() -> None:
    async def asked() -> Seen:
        async def slow(_: httpx.Request) -> httpx.Response:
            await asyncio.sleep(30)
            return httpx.Response(500)

        seen = Seen()
        async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(slow)) as client:
            await ask(client, Request("left", {"max_tokens": 3}, wait=0.02), seen)
        return seen

    seen = asyncio.run(asked())
    assert not seen.wrong
    assert seen.kinds == {"left": 1}


@pytest.mark.parametrize(
    ("request_", "status", "reply", "noted"),
    [
        (Request("whole", {"max_tokens": 3}), 200, json.dumps(ANSWER), ""),
        (Request("whole", {"max_tokens": 4}), 200, json.dumps(ANSWER), "3 tokens in place of 4"),
        (Request("whole", {"max_tokens": 3}), 500, "{}", "status 500 in place of 200"),
        (Request("bad", {"max_tokens": -1}, status=400), 200, json.dumps(ANSWER), "status 200 in place of 400"),
        (Request("bad", {"max_tokens": -1}, status=400), 400, "{}", ""),
        (Request("streamed", {"max_tokens": 3, "stream": True}), 200, f"{PIECES}data: {json.dumps(ANSWER)}\n\n", ""),
        (Request("streamed", {"max_tokens": 3, "stream": True}), 200, PIECES, "an answer without its usage"),
        (Request("given_up", {"max_tokens": 3, "stream": True}, after=2), 200, PIECES, ""),
        (Request("left", {"max_tokens": 3}, wait=5.0), 200, json.dumps(ANSWER), ""),
        (Request("left", {"max_tokens": 3}, wait=5.0), 500, "{}", "status 500 in place of 200"),
    ],
)
def test_what_a_client_notes(request_: Request, status: int, reply: str, noted: str) -> None:
    async def asked() -> Seen:
        seen = Seen()
        served = httpx.MockTransport(lambda _: httpx.Response(status, text=reply))
        async with httpx.AsyncClient(base_url="http://server", transport=served) as client:
            await ask(client, request_, seen)
        return seen

    seen = asyncio.run(asked())
    if noted:
        assert not seen.kinds
        assert len(seen.wrong) == 1
        assert noted in seen.wrong[0]
        return
    assert not seen.wrong
    assert seen.kinds == {request_.kind: 1}
    answered = request_.kind in ("whole", "streamed")
    assert seen.usage == ({"completion_tokens": 3, "rows_read": 5} if answered else {})
