"""`sparseattn eval --endpoint`: servers asked the prompts of a local model, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sparseattn.cli.app import app
from sparseattn.evaluation.intervals import paired, wilson
from sparseattn.evaluation.tasks.served import whole_line
from sparseattn.models.errors import ModelError
from sparseattn.models.load import load_tokenizer, reference_folder
from sparseattn.serving import bounded_replies, openai_client, questions, served_tokenizer
from sparseattn.serving.metrics import MetricsError, served_activity
from sparseattn.serving.questions import Address

pytest.importorskip("openai")
Reply = Callable[[str], str]
USER, MODEL = "<user>", "<model>"  # the template of a server's chats


def right(prompt: str) -> str:
    """What stands behind the pass key, or behind the key that the prompt ends with."""
    key = re.search(r"The pass key is (\d+)\.", prompt)
    return f" {key[1]}\n" if key else prompt.split(prompt.rstrip(":").split("\n")[-1] + ":")[1].split("\n")[0] + "\n"


class Server:
    """Speaks as much of the protocol as vLLM does, with bytes as tokens.

    Attributes:
        asked: bodies of requests for answers.
        faults: what to do instead of answering, each once: a status with headers and body, a name, or a function of
            the connection.
        instead: path -> what is always done there instead, a function of the connection.
        most: requests for answers that were here at once.
    """

    def __init__(self, reply: Reply = right, model: str = "served", **card: Any) -> None:
        self.reply, self.cards = reply, [{"id": model, "object": "model", **card}]
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.faults: list[tuple[int, dict[str, str], Any] | str | Callable[[Any], None]] = []
        self.instead: dict[str, Callable[[Any], None]] = {}
        self.counts = True  # whether there is a /tokenize
        self.barrier: threading.Barrier | None = None
        self.sent = self.most = self._here = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or a body waits 40 ms until its head is acknowledged

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.headers.append(self.headers)
                if self.path in outer.instead:
                    outer.instead[self.path](self)
                    return
                found = {"/v1/models": {"data": outer.cards}, "/version": {"version": "1.2"}}.get(self.path)
                self.say(200, found) if found else self.say(404, {"detail": "Not Found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path in outer.instead:
                    outer.instead[self.path](self)
                    return
                if self.path in ("/tokenize", "/detokenize"):
                    self.say(200, outer.counted(body)) if outer.counts else self.say(404, {"detail": "Not Found"})
                    return
                with outer._lock:
                    outer.asked.append(body)
                    fault = outer.faults.pop(0) if outer.faults else None
                    outer._here += 1
                    outer.most = max(outer.most, outer._here)
                try:
                    if outer.barrier is not None:
                        outer.barrier.wait(20)
                    self.answer(body, fault)
                finally:
                    with outer._lock:
                        outer._here -= 1

            def answer(self, body: dict[str, Any], fault: Any) -> None:
                if isinstance(fault, tuple):
                    status, headers, words = fault
                    self.say(status, words, headers)
                elif callable(fault):
                    fault(self)
                elif fault == "reset":
                    self.reset()
                else:
                    self.stream(body, fault)

            def say(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "text/html" if isinstance(body, str) else "application/json")
                self.send_header("content-length", str(len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def stream(self, body: dict[str, Any], fault: Any) -> None:
                chat = self.path == "/v1/chat/completions"
                prompt = outer.templated(body["messages"]) if chat else body["prompt"]
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                reply = outer.reply(prompt)[: body["max_tokens"]]
                for number, letter in enumerate([*reply, ""]):
                    if fault == "torn" and number == 2:
                        self.reset()
                        return
                    piece = {"delta": {"content": letter}} if chat else {"text": letter}
                    piece["finish_reason"] = "stop" if number == len(reply) else None
                    event = {"error": {"message": "the engine died"}} if fault == "dies" else {"choices": [piece]}
                    if fault == "mute":
                        break
                    if fault in ("abort", "content_filter") and number == 2:
                        piece["finish_reason"] = fault
                        self.wfile.write(f"data: {json.dumps({'choices': [piece]})}\n\n".encode())
                        break
                    try:
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                        self.wfile.flush()
                    except OSError:  # the client has heard enough
                        return
                    outer.sent += 1
                self.wfile.write(b"data: [DONE]\n\n")

            def reset(self) -> None:
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                self.connection.close()

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None:  # of a connection that was reset on purpose
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def templated(self, messages: list[dict[str, str]]) -> str:
        return "".join((USER if one["role"] == "user" else MODEL) + one["content"] for one in messages)

    def counted(self, body: dict[str, Any]) -> dict[str, Any]:
        if "tokens" in body:
            return {"prompt": bytes(body["tokens"]).decode()}
        text = body["prompt"] if "prompt" in body else self.templated(body["messages"]) + MODEL
        return {"tokens": list(text.encode()), "count": len(text.encode())}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes servers, and pauses between attempts short."""
    monkeypatch.setattr(openai_client, "PAUSE", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made: list[Server] = []

    def one(*arguments: Any, **options: Any) -> Server:
        made.append(Server(*arguments, **options))
        return made[-1]

    yield one
    for server in made:
        server.http.shutdown()
        server.http.server_close()


SMALL = ["--lengths", "300,560", "--depths", "0,1", "--samples", "2"]


def run(*arguments: object, model: str | None = "reference", figures: bool = False) -> Result:
    named = ["--model", model] if model else []
    drawn = [] if figures else ["--no-figures"]
    return CliRunner().invoke(app, ["eval", *named, *drawn, *(str(argument) for argument in arguments)])


def said(done: Result) -> str:
    return " ".join(done.output.split())


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]


def test_servers_stand_beside_each_other_and_a_second_run_asks_nothing(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    def forgetful(prompt: str) -> str:  # reads the last 350 letters
        return right(prompt) if "The pass key is" in prompt[-350:].rpartition("What is")[0] else " 1\n"

    dense, quest = serve(), serve(forgetful, model="other", max_model_len=4096)
    options = ["--endpoint", f"dense={dense.url}", "--endpoint", f"quest={quest.url}/v1/", "--task", "passkey"]
    options += [*SMALL, "--concurrency", "3", "--out", tmp_path]
    done = run(*options, figures=True)
    assert done.exit_code == 0, done.output
    records = lines(tmp_path)
    assert len(records) == 2 * 8
    sent = [sorted(body["prompt"] for body in server.asked) for server in (dense, quest)]
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 8
    for body in dense.asked:
        assert (body["model"], body["temperature"], body["repetition_penalty"]) == ("served", 0, 1)
        assert body["prompt"].endswith("What is the pass key? The pass key is")
        assert len(body["prompt"]) in range(230, 561)
    one = records[-1]
    facts = {"method": "quest", "protocol": "whole", "url": f"{quest.url}/v1", "served_model": "other"}
    facts |= {"source": f"other at {quest.url}/v1", "server_version": "1.2", "concurrency": 3, "attempts": 1}
    assert {name: one[name] for name in facts} == facts
    assert one["new_tokens"] == len(one["response"])
    assert 0 < one["first_token_seconds"] <= one["seconds"]
    assert one["versions"]["openai"]
    scores = {(m["method"], m["length"], m["depth"]): m["score"] for m in records}
    assert {where for where, score in scores.items() if score == 0} == {("quest", 560, 0.0)}
    shown = [line.split() for line in done.stdout.splitlines()]
    assert ["passkey", "300", "all", "4", "100", "100", "+0.0", "(-49.0", "to", "+49.0)"] in shown
    (row,) = [line for line in shown if line[:3] == ["passkey", "560", "all"]]
    assert row[4:7] == ["100", "50", "-50.0"]
    assert "dense has passkey 100%. quest: -25.0 points from that over 8 prompts." in re.sub(
        r" \(.*?\)", "", said(done)
    )
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["accuracy.png", "heat-passkey-whole.png"]
    before, asked = (tmp_path / "eval.jsonl").read_bytes(), len(dense.asked) + len(quest.asked)
    again = run(*options, "--json")
    assert again.exit_code == 0, again.output
    assert len(dense.asked) + len(quest.asked) == asked
    assert (tmp_path / "eval.jsonl").read_bytes() == before
    told = [json.loads(line) for line in again.stdout.splitlines()]
    assert [one["method"] for one in told] == ["dense", "quest"] * 8, "in the order of the prompts"
    assert {one["full_answers"] for one in told} == {1.0}, "what the first one answers"


def test_a_server_is_asked_what_a_model_here_is_asked(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, own = serve(), tmp_path / "own.jsonl"
    own.write_text(json.dumps({"context": "a:1\n" + "The sky is blue.\n" * 60, "question": "a:", "answers": ["1"]}))
    options = ["--task", "kv", "--lengths", "560", "--depths", "0.5", "--samples", "2", "--prompts", own]
    options += ["--max-length", "400"]
    done = run(*options, "--endpoint", server.url, "--out", tmp_path / "there")
    assert done.exit_code == 0, done.output
    done = run(*options, "--selector", "window", "--out", tmp_path / "here")
    assert done.exit_code == 0, done.output
    here = {one["prompt"]: one for one in lines(tmp_path / "here") if one["method"] == "full"}
    there = {one["prompt"]: one for one in lines(tmp_path / "there")}
    assert here.keys() == there.keys()
    assert len(here) == 3
    for prompt, one in there.items():
        for name in ("task", "prompt_tokens", "answers", "scoring"):
            assert one[name] == here[prompt][name]
        assert one["method"] == f"{server.url}/v1"
        assert one["score"] == 1.0
    asked = {len(body["prompt"].encode()) for body in server.asked}
    assert asked == {one["prompt_tokens"] for one in there.values()}, "cut in the middle where the model's is"


def test_requests_are_at_the_server_at_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    server.barrier = threading.Barrier(3)  # breaks, and with it the answers, where fewer come together
    done = run("--endpoint", server.url, "--task", "kv", *SMALL, "--lengths", "560,600,640", "--concurrency", "3",
               "--out", tmp_path)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert len(lines(tmp_path)) == 12
    assert server.most == 3


def test_what_passes_is_tried_again(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    server.faults = [(503, {}, "<html>loading</html>"), (429, {"retry-after": "0"}, {"error": {"message": "slowly"}})]
    server.faults += ["reset", "torn"]
    options = ["--endpoint", server.url, "--task", "passkey", "--lengths", "300", "--depths", "0.5", "--samples", "1"]
    done = run(*options, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (one,) = lines(tmp_path)
    assert (one["attempts"], one["score"]) == (5, 1.0)
    assert len({body["prompt"] for body in server.asked}) == 1


@pytest.mark.parametrize(
    ("fault", "sentence", "attempts"),
    [
        (
            (400, {}, {"error": {"message": "This model's maximum context length is 100 tokens.", "code": 400}}),
            "refuses a prompt of passkey (length 560, depth 0.0, seed 0) with status 400: This model's maximum context "
            "length is 100 tokens",
            1,
        ),
        ((500, {}, {"detail": "no memory"}), "with status 500: no memory", 1),
        ((401, {}, {"error": "who are you"}), "with status 401: who are you; the key is taken from OPENAI_API_KEY", 1),
        ((503, {}, "<html>down</html>"), "with status 503: <html>down</html>", 5),
        ("torn", "is out of reach: ", 5),
        ("abort", "is out of reach: it broke off in the middle of an answer", 5),
        ("content_filter", "held back a part of its answer to a prompt of passkey (length 560, depth 0.0, seed 0)", 1),
        ("dies", "broke off at a prompt of passkey (length 560, depth 0.0, seed 0): the engine died", 1),
    ],
)
def test_what_goes_wrong_is_a_sentence_and_the_work_so_far_is_kept(
    serve: Callable[..., Server], tmp_path: Path, fault: Any, sentence: str, attempts: int
) -> None:
    server = serve()
    options = ["--endpoint", f"dense={server.url}", "--task", "passkey", *SMALL, "--concurrency", "1"]
    assert run(*options, "--lengths", "300", "--out", tmp_path).exit_code == 0
    before, asked = (tmp_path / "eval.jsonl").read_bytes(), len(server.asked)
    server.faults = [fault] * attempts
    done = run(*options, "--out", tmp_path)
    assert done.exit_code == 2, done.exception
    assert f"the server dense ({server.url}/v1) " in said(done)
    assert sentence in said(done)
    assert (tmp_path / "eval.jsonl").read_bytes().startswith(before)
    assert len(server.asked) >= asked + attempts
    server.faults, left = [], 8 - len(lines(tmp_path))
    server.asked.clear()
    assert run(*options, "--out", tmp_path).exit_code == 0
    assert (len(lines(tmp_path)), len(server.asked)) == (8, left)


def test_counters_that_are_no_http_are_a_sentence(serve: Callable[..., Server]) -> None:
    server = serve()

    def garbage(handler: Any) -> None:
        handler.wfile.write(b"garbage\r\n\r\n")
        handler.close_connection = True

    server.instead["/metrics"] = garbage
    with pytest.raises(MetricsError, match="the counters of the server cannot be read at"):
        served_activity(server.url)


def test_what_is_not_answered_yet_is_dropped(serve: Callable[..., Server]) -> None:
    free = threading.Event()

    def slow(prompt: str) -> str:
        free.wait(20)
        return right(prompt)

    server = serve(slow)
    with openai_client.Server(Address.of(server.url)) as one, one.asking(2) as ask:
        asked = [ask(questions.Question("it", f"The pass key is {n}.", None, 9, bool)) for n in range(4)]
        while len(server.asked) < 2:
            time.sleep(0.001)
    assert not free.is_set(), "nobody waited for the server"
    assert all(future.cancelled() for future in asked)
    free.set()
    assert len(server.asked) == 2


def test_a_stream_of_nothing_is_no_answer(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda prompt: "")
    options = ["--endpoint", server.url, "--task", "passkey", "--lengths", "300", "--depths", "0", "--samples", "1"]
    done = run(*options, "--out", tmp_path)
    assert done.exit_code == 0, "an answer without a word is one"
    assert (lines(tmp_path)[0]["response"], lines(tmp_path)[0]["first_token_seconds"]) == ("", None)
    server.faults = ["mute"]
    done = run(*options, "--seed", "1", "--out", tmp_path)
    assert done.exit_code == 2
    assert "sent no answer to a prompt of passkey" in said(done)


def test_a_response_ends_where_a_models_here_ends(serve: Callable[..., Server], tmp_path: Path) -> None:
    def endless(prompt: str) -> str:
        time.sleep(0.01)
        return "\n\n" + right(prompt) + "9" * 100_000

    server = serve(endless)
    options = ["--endpoint", server.url, "--task", "passkey", "--lengths", "300", "--depths", "0", "--samples", "1"]
    done = run(*options, "--answer-tokens", "100000", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (one,) = lines(tmp_path)
    assert re.fullmatch(r"\n\n \d{5}\n", one["response"])
    assert one["score"] == 1.0
    assert server.sent < 100_000, "the rest was not read"


ONE = ["--task", "passkey", "--lengths", "300", "--depths", "0", "--samples", "1"]


def begun(there: Any, kind: str, **more: str) -> None:
    """Says that a reply comes, of no length that is known."""
    there.send_response(200)
    for name, value in {"content-type": kind, "connection": "close", **more}.items():
        there.send_header(name, value)
    there.end_headers()


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': None}]})}\n\n".encode()


def dripping(data: bytes, kind: str, pause: float = 0.02, first: bytes = b"") -> Callable[[Any], None]:
    """Sends the same again and again for 20 seconds, with pauses: silence, where it is nothing."""

    def drip(there: Any) -> None:
        begun(there, kind)
        end = time.monotonic() + 20
        with contextlib.suppress(OSError):
            there.wfile.write(first)
            while time.monotonic() < end:
                there.wfile.write(data)
                there.wfile.flush()
                time.sleep(pause)

    return drip


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nothing_is_sent_to_where_a_server_redirects(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    server, other = serve(), serve()
    server.faults = [(status, {"location": f"{other.url}/v1/completions"}, "")]
    done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert not other.asked
    assert not other.headers
    sentence = "redirects a prompt of passkey (length 300, depth 0.0, seed 0) to"
    assert f"the server dense ({server.url}/v1) {sentence} {other.url}/v1/completions, and nothing is sent" in said(
        done
    )
    assert len(server.asked) == 1, "it is not tried again"
    where = {"location": f"{other.url}/v1/models"}
    server.instead["/v1/models"] = lambda there: there.say(status, "", where)
    done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert f"redirects the list of its models to {other.url}/v1/models, and nothing is sent" in said(done)
    del server.instead["/v1/models"]
    server.instead["/tokenize"] = lambda there: there.say(status, "", {"location": f"{other.url}/tokenize"})
    done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path, model=None)
    assert "has no /tokenize such as vLLM's" in said(done)
    assert not other.headers
    assert not other.asked


def endless(kind: str, written: list[int]) -> Callable[[Any], None]:
    """One line of 48 MB."""

    def send(there: Any) -> None:
        begun(there, kind)
        with contextlib.suppress(OSError):
            there.wfile.write(b'data: {"')
            written.extend(there.wfile.write(b"x" * 16_000) for _ in range(3_000))

    return send


def test_no_more_of_a_reply_is_read_than_it_should_have(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, written = serve(), []
    server.faults = [endless("text/event-stream", written)]
    done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert "sends an event of its answer of more than 1,048,576 bytes, which is not read" in said(done)
    assert sum(written) < 20_000_000, "all but what lay in the system's buffers"
    assert len(server.asked) == 1, "it is not tried again"
    for path, kind in (("/v1/models", "application/json"), ("/version", "application/json")):
        written.clear()
        server.instead = {path: endless(kind, written)}
        done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path)
        assert done.exit_code == 2, done.output
        assert "sends a reply of more than 16,777,216 bytes, which is not read" in said(done)
        assert sum(written) < 36_000_000


def test_events_are_bounded_one_by_one(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_replies, "EVENT", 200)
    server = serve(lambda prompt: "7" * 100)

    def ask(fault: Any = None) -> str:
        server.faults = [fault]
        with openai_client.Server(Address.of(server.url)) as one, one.asking(1) as asked:
            return asked(questions.Question("it", "?", None, 1000, lambda text: False)).result(20).text

    assert ask() == "7" * 100, "more than 200 bytes, of which no event has more"
    for end in ("\n\n", "\r\n\r\n", "\r\r"):
        last = b'data: {"choices": [{"text": "!", "finish_reason": "stop"}]}'

        def send(there: Any, end: bytes = end.encode(), last: bytes = last) -> None:
            begun(there, "text/event-stream")
            for byte in (b": busy" + end) * 60 + last + end:  # the end of an event may come in two pieces
                there.wfile.write(bytes([byte]))
            there.wfile.write(b"data: [DONE]" + end)

        assert ask(send) == "!"
    with pytest.raises(questions.ServerError, match="an event of its answer of more than 200 bytes"):
        ask(dripping(b"data: 1\n", "text/event-stream", pause=0))


@pytest.mark.parametrize(
    ("drip", "stream"),
    [
        (lambda there: time.sleep(20), False),
        (dripping(b"", "application/json"), False),
        (dripping(b" ", "application/json"), False),
        (lambda there: time.sleep(20), True),
        (dripping(b"", "text/event-stream"), True),
        (dripping(b": busy\n\n", "text/event-stream"), True),
        (dripping(b": busy\n\n", "text/event-stream", first=event("7")), True),
        (dripping(event(""), "text/event-stream", first=event("7"), pause=1), True),
    ],
    ids=["no reply", "no byte", "no end", "no answer", "no event", "comments", "comments behind text", "pauses"],
)
def test_silence_is_not_waited_out(
    serve: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drip: Callable[[Any], None],
    stream: bool,
) -> None:
    seconds = {"PATIENCE": 0.2, "GAP": 0.15} if stream else {"SOON": 0.15}
    for name, value in seconds.items():
        monkeypatch.setattr(openai_client, name, value, raising=False)
    server, began = serve(), time.monotonic()
    if stream:
        server.faults = [drip]
    else:
        server.instead["/v1/models"] = drip
    done = run("--endpoint", f"dense={server.url}", *ONE, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert re.search(r"did not answer in time \(10 s to connect, 0\.(2|15) s to go on\)", said(done))
    assert time.monotonic() - began < 15
    assert len(server.asked) == int(stream), "it is not tried again"


def test_what_a_server_says_of_itself_is_waited_for_a_minute_and_answers_longer() -> None:
    assert openai_client.SOON <= 60 < openai_client.GAP < openai_client.PATIENCE


def test_a_stream_without_an_end_is_cut_at_the_limit(serve: Callable[..., Server], tmp_path: Path) -> None:
    server, sent = serve(), []

    def more(there: Any) -> None:
        begun(there, "text/event-stream")
        with contextlib.suppress(OSError):
            for _ in range(3000):
                there.wfile.write(event("7"))
                there.wfile.flush()
                sent.append(1)
                time.sleep(0.001)

    server.faults = [more]
    done = run("--endpoint", server.url, *ONE, "--answer-tokens", "20", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (one,) = lines(tmp_path)
    assert (one["response"], one["new_tokens"], one["attempts"]) == ("7" * 20, 20, 1)
    assert len(sent) < 3000


def test_a_stream_of_empty_events_ends(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_client, "MUTE", 50, raising=False)
    server = serve()
    server.faults = [dripping(event(""), "text/event-stream", pause=0)]
    done = run("--endpoint", server.url, *ONE, "--answer-tokens", "20", "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert "with more events than its 20 tokens can have, got 71" in said(done)


def test_a_packed_reply_is_not_unpacked(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()

    def bomb(there: Any) -> None:
        begun(there, "application/json", **{"content-encoding": "gzip"})
        there.wfile.write(gzip.compress(b" " * 30_000_000))

    server.instead["/v1/models"] = bomb
    done = run("--endpoint", server.url, *ONE, "--out", tmp_path)
    assert done.exit_code == 2, done.output
    assert "packs its reply (gzip), which it was asked not to" in said(done)
    assert server.headers[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize("after", ["nan", "-1", "soon"])
def test_a_pause_that_is_no_time_is_not_kept(serve: Callable[..., Server], tmp_path: Path, after: str) -> None:
    server = serve()
    server.faults = [(429, {"retry-after": after}, {})]
    assert run("--endpoint", server.url, *ONE, "--out", tmp_path).exit_code == 0
    assert lines(tmp_path)[0]["attempts"] == 2


@pytest.mark.parametrize("text", ["", "\n", "a", "\n \n a b\n", " a\nb\nc", "a\r\nb"])
def test_a_whole_line_is_as_far_as_a_line_ends_behind_text(text: str) -> None:
    ends = [n for n in range(1, len(text) + 1) if "\n" in text[:n].lstrip()]
    assert whole_line(text) == text[: ends[0] if ends else len(text)]


def test_chats_count_by_the_servers_own_tokenizer(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    options = ["--endpoint", server.url, "--chat", "--task", "passkey", "--lengths", "300", "--depths", "0"]
    done = run(*options, "--samples", "1", "--out", tmp_path, model=None)
    assert done.exit_code == 0, done.output
    (body,) = server.asked
    user, model = body["messages"]
    assert (user["role"], model["role"]) == ("user", "assistant")
    assert user["content"].endswith("\nWhat is the pass key?")
    assert model["content"] == "The pass key is"
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    (one,) = lines(tmp_path)
    assert one["score"] == 1.0
    assert one["settings"]["model"] == "served"
    assert 300 - 80 < one["prompt_tokens"] <= 300
    assert one["prompt_tokens"] >= len(USER + user["content"] + MODEL + model["content"])


def test_a_tokenizer_that_counts_otherwise_is_said(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    monkeypatch.setattr(server, "counted", lambda body: {"tokens": [1, 2, 3]})
    options = ["--endpoint", f"dense={server.url}", "--task", "passkey", "--lengths", "300", "--depths", "0"]
    done = run(*options, "--samples", "1", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    sentence = (
        f"the server dense (served) counts 3 tokens where the tokenizer of reference counts "
        f"{len(served_tokenizer.PROBE)}"
    )
    assert sentence in said(done)


def test_the_key_comes_from_the_environment_and_is_in_no_record(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
    server = serve()
    options = ["--endpoint", server.url, "--task", "passkey", "--lengths", "300", "--depths", "0", "--samples", "1"]
    assert run(*options, "--out", tmp_path).exit_code == 0
    # Counters at /metrics are asked for without it: vLLM does not protect them.
    assert {one["authorization"] for one in server.headers if one["authorization"]} == {"Bearer a-secret"}
    assert "a-secret" not in (tmp_path / "eval.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--budget", "64", "--sink", "4"], "--endpoint cannot run --budget, --sink: a server reads whole prompts"),
        (
            ["--selector", "quest"],
            "--endpoint cannot run --selector: a server reads whole prompts with its own attention; start one",
        ),
        (["--protocol", "question"], "--endpoint cannot run --protocol"),
        (["--task", "agreement"], "--endpoint cannot run --task agreement"),
        (["--concurrency", "0"], "--concurrency must be 1 or more, got 0"),
        (["--endpoint", "dense=http://127.0.0.1:2"], "two endpoints have the name dense: http://127.0.0.1:1/v1"),
        (
            ["--endpoint", "localhost:8000"],
            "--endpoint is NAME=URL or URL, such as dense=http://127.0.0.1:8000/v1, got",
        ),
        (["--endpoint", "http://me:secret@host/v1"], "--endpoint takes no password and no query"),
        ([], "the server dense (http://127.0.0.1:1/v1) is out of reach: "),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    done = run("--endpoint", "dense=http://127.0.0.1:1", "--lengths", "560", "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert sentence in said(done)
    assert not (tmp_path / "out" / "eval.jsonl").exists()


def test_concurrency_is_of_servers(tmp_path: Path) -> None:
    done = run("--concurrency", "2", "--lengths", "560", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "--concurrency needs --endpoint or --engine vllm" in said(done)


def test_what_servers_do_not_have_is_a_sentence(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(max_model_len=500)

    def refused(*options: object, model: str | None = "reference") -> str:
        done = run(*options, "--task", "passkey", "--lengths", "560", "--out", tmp_path, model=model)
        assert done.exit_code == 2, done.output
        assert not (tmp_path / "eval.jsonl").exists()
        assert not server.asked
        return said(done)

    sentence = "the server a takes 500 tokens, a prompt of --lengths 560 takes 560"
    assert sentence in refused("--endpoint", f"a={server.url}")
    assert "has no model 'mine', it has served" in refused("--endpoint", f"{server.url}#mine")
    assert "with status 404: Not Found" in refused("--endpoint", f"{server.url}/elsewhere")
    server.counts = False
    assert "say with --model whose tokenizer makes the prompts" in refused("--endpoint", server.url, model=None)
    server.cards.append({"id": "second"})
    assert f"name one behind the URL, as in {server.url}/v1#served" in refused("--endpoint", server.url)
    server.cards.clear()
    assert f"lists no models at {server.url}/v1/models: is it the address of" in refused("--endpoint", server.url)


def test_addresses() -> None:
    plain = Address.of("http://host:8000")
    assert plain == Address("http://host:8000/v1", "http://host:8000/v1")
    assert Address.of("a=https://host/x/v1/#org/m=1") == Address("a", "https://host/x/v1", "org/m=1")
    assert Address.of("http://host/v1#a=b") == Address("http://host/v1", "http://host/v1", "a=b")
    for wrong in ("", "host", "=http://host", "a=", "ftp://host", "http://", "http://host:port", "http://host?k=v"):
        with pytest.raises(ValueError, match="--endpoint"):
            Address.of(wrong)


def test_a_tokenizer_is_loaded_without_weights(tmp_path: Path) -> None:
    assert load_tokenizer("reference") is None, "bytes"
    shutil.copy(reference_folder() / "config.json", tmp_path)
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer(tmp_path / "none")


def test_a_paired_interval_is_narrower_where_prompts_go_together_and_never_nothing() -> None:
    right_, wrong = [1.0] * 20, [0.0] * 20
    low, high = paired(right_, right_)
    assert (low, high) == pytest.approx((-(1 - wilson(right_)[0]), 1 - wilson(right_)[0]))
    assert paired(right_, wrong)[1] == pytest.approx(1.0)
    ours = [1.0] * 30 + [0.0] * 10
    together = [1.0] * 26 + [0.0] * 14
    apart = [0.0] * 14 + [1.0] * 26
    low, high = paired(ours, together)
    assert low < 0.1 < high
    assert high - low < 0.6 * (paired(ours, apart)[1] - paired(ours, apart)[0])
    assert paired(together, ours) == pytest.approx((-high, -low))
    # Newcombe 1998, table II, of 50 pairs: 20 right twice, 12 and 2 right once, 16 wrong twice
    one, two = [1.0] * 32 + [0.0] * 18, [1.0] * 20 + [0.0] * 12 + [1.0] * 2 + [0.0] * 16
    assert paired(one, two) == pytest.approx((0.0562, 0.3290), abs=1e-3)
