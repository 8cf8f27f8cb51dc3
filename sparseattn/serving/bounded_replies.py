"""Replies of a server within bounds: the bytes of one, or of an event of a stream, and the time until its end."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from sparseattn.serving.questions import ServerError

REPLY = 1 << 24  # bytes of a reply at once: the tokens of a prompt of a million take less than half
EVENT = 1 << 20  # bytes of one event of a stream


@dataclass
class ReplyBounds:
    """What is read of a reply: whom it is of, whether it is a stream of events, until when, and what is said then."""

    who: str
    events: bool
    end: float
    late: ServerError
    held: int = 0  # bytes of the reply, or of the event that is not over
    tail: bytes = b""

    def check(self, data: bytes) -> bytes:
        """Return `data`, the next bytes; ServerError where they are too many or too late."""
        if time.monotonic() > self.end:
            raise self.late
        self.held += len(data)
        if self.events:  # an event ends with an empty line, which may lie across two pieces of data
            seen = self.tail + data
            over = max(seen.rfind(end) + len(end) if end in seen else 0 for end in (b"\n\n", b"\r\r", b"\r\n\r\n"))
            if over:
                self.held = len(seen) - over
            self.tail = seen[-3:]
        most = EVENT if self.events else REPLY
        if self.held > most:
            what = "an event of its answer" if self.events else "a reply"
            raise ServerError(f"{self.who} sends {what} of more than {most:,} bytes, which is not read")
        return data


def bounded(reply: Any, bounds: ReplyBounds) -> Any:
    """Return the stream of a reply's bytes within bounds. Older releases of openai go by httpx, newer ones by
    httpx2."""
    library, inner = sys.modules[type(reply).__module__.partition(".")[0]], reply.stream

    def read(self: Any) -> Iterator[bytes]:
        return map(bounds.check, inner)

    async def read_async(self: Any) -> AsyncIterator[bytes]:
        async for data in inner:
            yield bounds.check(data)

    def close(self: Any) -> None:
        inner.close()

    async def close_async(self: Any) -> None:
        await inner.aclose()

    made = {"__iter__": read, "__aiter__": read_async, "close": close, "aclose": close_async}
    return type("Bounded", (library.SyncByteStream, library.AsyncByteStream), made)()
