"""A server that speaks OpenAI's protocol: its model, its tokenizer, and its answers to prompts, several at once.

`openai` is imported when a server is reached. Streams are read as they come, so that the first token's time is known.

A server is not trusted. Prompts and the key go to the address that was named and to none that it redirects to, and what
it sends is bounded: the bytes of a reply and of an event, the pieces of an answer, and the time without one.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from sparseattn.serving.bounded_replies import ReplyBounds, bounded
from sparseattn.serving.questions import Address, Answer, Question, ServerError

ATTEMPTS = 5  # at an answer, where what failed may pass
PAUSE = 0.5  # seconds before the second attempt; each next pause is twice as long, or as long as the server asks
LONGEST = 60.0  # seconds of such a pause
PASSING = (408, 429, 502, 503, 504)  # statuses of a server that may answer later
PATIENCE = 3600.0  # seconds to an answer's first text: a prompt of a million tokens takes long before it
GAP = 600.0  # seconds from one piece of an answer to the next: a busy server lets some requests wait for others
SOON = 60.0  # seconds for all that a server need not compute: its models, its version, tokens of a text
REACH = 10.0  # seconds to connect
MUTE = 1000  # events without text, beyond one for each token asked for: some servers say so that they still work
SENTENCE = 500  # characters of a server's own words


# What servers say of an answer that is not all that the model had to say.
FAILED, FILTERED = ("abort", "error"), ("content_filter",)


class _Torn(Exception):
    """A stream without its end."""

    def __str__(self) -> str:
        return "it broke off in the middle of an answer"


class Server:
    """A connection to a server. Close it, or use it as a context manager.

    Args:
        address: the server's address.

    Attributes:
        name, url: of the address.
        model: the server's name of the model.
        positions: tokens that prompt and answer may have; None: it does not say.
        version: of the server's program; None: it does not say.

    Raises:
        ImportError: `openai` is missing.
        ServerError: out of reach, no such API there, or not one model.
    """

    def __init__(self, address: Address) -> None:
        self._openai = _library()
        self.name, self.url = address.name, address.url
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "api_key": os.environ.get("OPENAI_API_KEY") or "none",  # a server of one's own seldom asks for it
            "max_retries": 0,  # it would not retry a broken stream, and would retry what is refused here
            "default_headers": {"Accept-Encoding": "identity"},  # a packed reply is as long as it says once unpacked
        }
        self._client = self._openai.OpenAI(
            **self._options,
            timeout=self._openai.Timeout(SOON, connect=REACH),
            http_client=self._openai.DefaultHttpxClient(
                follow_redirects=False, event_hooks={"response": [lambda reply: self._bind(reply, SOON)]}
            ),
        )
        try:
            self.model, self.positions = self._served(address.model)
            self.version = self._version()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def _served(self, wanted: str | None) -> tuple[str, int | None]:
        """Name and positions of the model."""
        try:
            listing = self._client.get("/models", cast_to=object)
        except Exception as error:
            raise self._sentence(error, "the list of its models", SOON) from error
        data = listing.get("data") if isinstance(listing, dict) else None
        cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        models = {str(card["id"]): card.get("max_model_len") for card in cards if "id" in card}
        if not models:
            raise ServerError(
                f"{self._who} lists no models at {self.url}/models: is it the address of an OpenAI-compatible API, "
                f"such as http://127.0.0.1:8000/v1?"
            )
        if wanted is None and len(models) > 1:
            raise ServerError(
                f"{self._who} has the models {', '.join(models)[:SENTENCE]}: name one behind the URL, as in "
                f"{self.url}#{next(iter(models))}"
            )
        name = next(iter(models)) if wanted is None else wanted
        if name not in models:
            raise ServerError(f"{self._who} has no model {name!r}, it has {', '.join(models)[:SENTENCE]}")
        positions = models[name]
        return name, positions if isinstance(positions, int) and positions > 0 else None

    def _version(self) -> str | None:
        """As vLLM says it beside its API."""
        reply = self._beside("get", "/version")
        version = reply.get("version") if isinstance(reply, dict) else None
        return version if isinstance(version, str) else None

    def _beside(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return what the server says at `path` outside its OpenAI API, where vLLM and SGLang have more; None: it has
        none."""
        url = self.url.removesuffix("/v1") + path
        ask = getattr(self._client, verb)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask(url, cast_to=object) if body is None else ask(url, cast_to=object, body=dict(body))
            except Exception as error:
                if (pause := self._pause(error, attempt)) is None:
                    if isinstance(error, self._openai.APIStatusError) and error.status_code not in PASSING:
                        return None
                    raise self._sentence(error, path, SOON) from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def ids(self, text: str, special: bool = False) -> list[int] | None:
        """Return the tokens of a text, by the server's tokenizer; None: it has no `/tokenize` of vLLM's form.

        `special`: with the tokens that mark a text's beginning and end.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        return _tokens(self._beside("post", "/tokenize", body))

    def turn(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Return the tokens of a chat, up to where the model is to answer; None: no such `/tokenize`, or no chat
        template."""
        body = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        return _tokens(self._beside("post", "/tokenize", body))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens. ServerError where the server does not give it."""
        reply = self._beside("post", "/detokenize", {"model": self.model, "tokens": list(ids)})
        if not isinstance(reply, dict) or not isinstance(reply.get("prompt"), str):
            raise ServerError(f"{self._who} has no /detokenize: say with --model whose tokenizer makes the prompts")
        return str(reply["prompt"])

    @contextlib.contextmanager
    def asking(self, concurrency: int) -> Iterator[Callable[[Question], Future[Answer]]]:
        """Give a function that asks and does not wait; `concurrency` requests at most are at the server at once.

        A future that fails has a ServerError. What is unanswered where the block ends is dropped.
        """
        import anyio
        from anyio.from_thread import start_blocking_portal

        requests: list[Future[Answer]] = []
        with start_blocking_portal() as portal:

            async def bind(reply: Any) -> None:
                self._bind(reply, math.inf)

            client = self._openai.AsyncOpenAI(
                **self._options,
                timeout=self._openai.Timeout(PATIENCE, connect=REACH),
                http_client=self._openai.DefaultAsyncHttpxClient(
                    follow_redirects=False, event_hooks={"response": [bind]}
                ),
            )
            room = portal.call(anyio.Semaphore, concurrency)

            def ask(question: Question) -> Future[Answer]:
                requests[:] = [request for request in requests if not request.done()]
                requests.append(portal.start_task_soon(self._answer, client, room, question))
                return requests[-1]

            try:
                yield ask
            finally:
                for request in reversed(requests):  # those that wait for room before those that would give it to them
                    request.cancel()
                portal.call(client.close)

    async def _answer(self, client: Any, room: Any, question: Question) -> Answer:
        import anyio

        async with room:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._once(client, question, attempt)
                except Exception as error:
                    if (pause := self._pause(error, attempt)) is None:
                        raise self._sentence(error, question.what, PATIENCE) from error
                await anyio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, client: Any, question: Question, attempt: int) -> Answer:
        began = time.perf_counter()
        first, text, chosen, whole, reason = None, "", False, False, None
        pieces = events = 0
        async with await self._within(PATIENCE, _begin(client, self.model, question)) as stream:
            chunks = stream.__aiter__()
            while (chunk := await self._within(PATIENCE if first is None else GAP, anext(chunks, None))) is not None:
                events += 1
                if events > question.limit + MUTE:
                    raise ServerError(
                        f"{self._who} answers {question.what} with more events than its {question.limit} tokens can "
                        f"have, got {events}: most hold no text, and the last is not in sight"
                    )
                piece = ""
                for choice in chunk.choices[:1]:  # none in a chunk that only counts
                    chosen, whole, reason = True, choice.finish_reason is not None, choice.finish_reason
                    piece = (choice.text if question.begun is None else choice.delta.content) or ""
                if piece and pieces == question.limit:  # a piece is a token or more, and all that were asked for came
                    whole = True
                    break
                pieces += bool(piece)
                text += piece
                if text and first is None:
                    first = time.perf_counter() - began
                if question.ended(text):
                    whole = True
                    break
        if not chosen:
            raise ServerError(f"{self._who} sent no answer to {question.what}, or not as a stream")
        if reason in FILTERED:
            raise ServerError(f"{self._who} held back a part of its answer to {question.what}: {reason}")
        # Without a length or an end of chunks, a lost connection looks like the end of the stream.
        if not whole or reason in FAILED:
            raise _Torn
        return Answer(text, first, time.perf_counter() - began, attempt)

    async def _within(self, seconds: float, awaited: Awaitable[Any]) -> Any:
        """Return what is awaited; ServerError where it takes longer, however busily bytes come meanwhile."""
        import anyio

        try:
            with anyio.fail_after(seconds):
                return await awaited
        except TimeoutError as error:
            raise self._late(seconds) from error

    def _bind(self, reply: Any, seconds: float) -> None:
        """Lets no more be read of a reply than there should be, for so many seconds; ServerError for a packed one."""
        packing = reply.headers.get("content-encoding", "identity")
        if packing != "identity":
            raise ServerError(f"{self._who} packs its reply ({packing[:SENTENCE]}), which it was asked not to")
        stream = "text/event-stream" in reply.headers.get("content-type", "")
        reply.stream = bounded(reply, ReplyBounds(self._who, stream, time.monotonic() + seconds, self._late(seconds)))

    @property
    def _who(self) -> str:
        return f"the server {self.name}" if self.name == self.url else f"the server {self.name} ({self.url})"

    def _lost(self, error: Exception) -> bool:
        """Whether the connection failed. In the middle of a stream older releases of openai raise httpx's own error."""
        named = {kind.__name__ for kind in type(error).__mro__}
        return isinstance(error, (self._openai.APIConnectionError, _Torn)) or "TransportError" in named

    def _pause(self, error: Exception, attempt: int) -> float | None:
        """Seconds until the next attempt; None: it is no use, or this was the last one."""
        if attempt == ATTEMPTS or _ours(error) is not None or isinstance(error, self._openai.APITimeoutError):
            return None  # the last: it was waited for long enough
        if not self._lost(error) and getattr(error, "status_code", None) not in PASSING:
            return None
        return min(_asked_to_wait(error) or PAUSE * 2 ** (attempt - 1), LONGEST)

    def _late(self, seconds: float) -> ServerError:
        return ServerError(f"{self._who} did not answer in time ({REACH:g} s to connect, {seconds:g} s to go on)")

    def _sentence(self, error: Exception, what: str, patience: float) -> ServerError:
        """Return what went wrong, with the server's own words; `patience`: seconds that it was waited for."""
        if (ours := _ours(error)) is not None:
            return ours
        if isinstance(error, self._openai.APITimeoutError):
            return self._late(patience)
        if self._lost(error):
            cause = error.__cause__ or error
            return ServerError(f"{self._who} is out of reach: {str(cause).strip() or type(cause).__name__}")
        if isinstance(error, self._openai.APIStatusError):
            if error.status_code in range(300, 400):
                where = " ".join(error.response.headers.get("location", "nowhere").split())[:SENTENCE]
                return ServerError(
                    f"{self._who} redirects {what} to {where}, and nothing is sent but to the address that was named: "
                    f"name that one with --endpoint if you trust it"
                )
            words = _own_words(error.body) or _own_words(error.response.text)
            key = "; the key is taken from OPENAI_API_KEY" if error.status_code in (401, 403) else ""
            return ServerError(
                f"{self._who} refuses {what} with status {error.status_code}: {words or 'it says no more'}{key}"
            )
        return ServerError(f"{self._who} broke off at {what}: {_own_words(str(error)) or type(error).__name__}")


def _ours(error: BaseException | None) -> ServerError | None:
    """Return the sentence that an error has or comes from: some releases of openai put errors into their own."""
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


def _library() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ImportError("asking a server needs openai: pip install 'sparseattn[endpoint]'") from error
    return openai


def _begin(client: Any, model: str, question: Question) -> Awaitable[Any]:
    """Return the stream of an answer, greedy: of the likeliest tokens, whatever the model's own settings penalise."""
    more: dict[str, Any] = {"repetition_penalty": 1.0}
    options: dict[str, Any] = {"model": model, "temperature": 0.0, "max_tokens": question.limit, "stream": True}
    if question.begun is None:
        started: Awaitable[Any] = client.completions.create(prompt=question.prompt, **options, extra_body=more)
        return started
    turns = (*question.before, ("user", question.prompt))
    messages = [{"role": role, "content": content} for role, content in turns]
    if question.begun:  # the server's template must not close the turn that the model is to go on with
        messages.append({"role": "assistant", "content": question.begun})
        more |= {"continue_final_message": True, "add_generation_prompt": False}
    chat: Awaitable[Any] = client.chat.completions.create(messages=messages, **options, extra_body=more)
    return chat


def _tokens(reply: Any) -> list[int] | None:
    ids = reply.get("tokens") if isinstance(reply, dict) else None
    return ids if isinstance(ids, list) and all(isinstance(token, int) for token in ids) else None


def _asked_to_wait(error: Exception) -> float | None:
    """Seconds of a Retry-After header."""
    response = getattr(error, "response", None)
    try:
        seconds = float(response.headers["retry-after"]) if response is not None else math.nan
    except (KeyError, ValueError):
        return None
    return None if math.isnan(seconds) else max(seconds, 0.0)


def _own_words(body: Any) -> str:
    """Return the sentence in an error's body, however deep servers put it."""
    while isinstance(body, dict):
        body = next((body[name] for name in ("message", "error", "detail") if body.get(name)), "")
    return " ".join(str(body or "").split())[:SENTENCE].rstrip(".")
