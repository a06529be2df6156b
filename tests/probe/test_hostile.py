"""Whatever a server sends: bounded memory and time, no redirect followed, nothing that acts on a terminal or a page."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from zerogap.cli import run
from zerogap.probe.client import Client, parse_address
from zerogap.probe.limits import (
    BODY_BYTES,
    BadAnswerError,
    Budget,
    HttpError,
    ProbeError,
    TooSlowError,
    UnreachableError,
)
from zerogap.probe.run import Question, probe

Send = Callable[[socket.socket, bytes], None]


@contextmanager
def raw_server(send: Send) -> Iterator[str]:
    """Answer every connection with whatever ``send`` writes for the request it is given."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    stopping = threading.Event()

    def serve() -> None:
        while not stopping.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                send(connection, connection.recv(1 << 16))
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1.0)
                while connection.recv(1 << 16):  # closing with unread bytes would reset the connection
                    pass
            except OSError:
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopping.set()
        thread.join(5)
        listener.close()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(send: Send, path: str = "/v1/completions", timeout_s: float = 2.0, events: bool = False) -> object:
    async def go(address: str) -> object:
        client = Client(address, Budget(50, 30.0), timeout_s=timeout_s)
        try:
            return await (client.events(path, {}) if events else client.post(path, {}))
        finally:
            await client.close()

    with raw_server(send) as address:
        return asyncio.run(go(address))


def pour(head: bytes, chunk: bytes, total: int) -> Send:
    def send(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head)
        for _ in range(total // len(chunk)):
            connection.sendall(chunk)

    return send


@pytest.mark.parametrize("events", [False, True])
def test_a_gigabyte_is_not_read(events: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n" + (b"data: [" if events else b"[")
    tracemalloc.start()
    try:
        with pytest.raises(BadAnswerError, match="more than 4 MB"):
            ask(pour(head, b"1," * 32768, 1 << 30), events=events)
        assert tracemalloc.get_traced_memory()[1] < 8 * BODY_BYTES
    finally:
        tracemalloc.stop()


def drip(head: bytes, piece: bytes) -> Send:
    def send(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head)
        for _ in range(400):
            connection.sendall(piece)
            time.sleep(0.05)

    return send


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\n[1\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: {}\n\n"),
    ],
    ids=["body", "headers", "events"],
)
@pytest.mark.parametrize("events", [False, True])
def test_an_endless_drip_ends_in_time(head: bytes, piece: bytes, events: bool) -> None:
    began = time.monotonic()
    with pytest.raises((TooSlowError, BadAnswerError)):
        ask(drip(head, piece), timeout_s=0.6, events=events)
    assert time.monotonic() - began < 3.0


def test_a_redirect_is_not_followed() -> None:
    reached = threading.Event()

    def other(connection: socket.socket, _: bytes) -> None:
        reached.set()
        connection.sendall(http(b"{}"))

    with raw_server(other) as target:
        with pytest.raises(BadAnswerError, match="redirects are not followed"):
            ask(lambda c, _: c.sendall(http(b"", "307 Temporary Redirect", f"Location: {target}/x")))
        assert not reached.is_set()


@pytest.mark.parametrize(
    "body",
    [b"{", b"<html><script>alert(1)</script></html>", b"[" * 2_000_000, b"", b"\xff\xfe\x00", b"9" * 10_000],
    ids=["cut", "html", "deep", "empty", "binary", "huge-number"],
)
def test_what_is_not_json_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(BadAnswerError, match="not JSON"):
        ask(lambda c, _: c.sendall(http(body)))


def test_compressed_bodies_are_refused() -> None:
    with pytest.raises(BadAnswerError, match="compressed"):
        ask(lambda c, _: c.sendall(http(b"\x1f\x8b" + bytes(100), "200 OK", "Content-Encoding: gzip")))


def test_an_error_body_is_inert() -> None:
    hostile = b"\x1b[2J\x1b]0;owned\x07<script>\xe2\x80\xae" + b"A" * 5000
    with pytest.raises(HttpError) as caught:
        ask(lambda c, _: c.sendall(http(hostile, "500 Internal Server Error")))
    text = str(caught.value)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert len(text) < 300


@pytest.mark.parametrize("garbage", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_what_is_not_http_is_unreachable(garbage: bytes) -> None:
    with pytest.raises(UnreachableError):
        ask(lambda c, _: c.sendall(garbage))


def liar(answer: Callable[[str], bytes]) -> Send:
    """A server that is detected as vLLM and answers completions with something hostile."""
    models = {"data": [{"id": "m\x1b[31m<b>", "owned_by": "vllm", "max_model_len": 4096}]}

    def send(connection: socket.socket, request: bytes) -> None:
        path = request.split(b" ")[1].decode()
        known = {
            "/v1/models": models,
            "/version": {"version": "\x1b[2J"},
            "/health": {},
            "/tokenize": {"tokens": [1, 2]},
        }
        body = json.dumps(known[path]).encode() if path in known else answer(path)
        status = "200 OK" if path in known or path.startswith("/v1") else "404 Not Found"
        connection.sendall(http(body, status))

    return send


HOSTILE_ANSWERS = [
    b'{"choices": [{}]}',
    b'{"choices": "no"}',
    b'{"choices": [{"logprobs": {"tokens": [1], "token_logprobs": ["x"]}, "text": {}}]}',
    b'{"choices": [{"logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [null]}, "token_ids": [-1]}]}',
    b'{"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [1e999], "top_logprobs": [{"a": NaN}]}}]}',
    b"[]",
    b"null",
    b"<html>\x1b[31m</html>",
    b'{"choices": [{"text": "\\u001b[2J", "logprobs": null, "finish_reason": ["x"]}], "usage": []}',
]


@pytest.mark.parametrize("answer", HOSTILE_ANSWERS, ids=range(len(HOSTILE_ANSWERS)))
def test_a_whole_probe_survives_any_answer(answer: bytes) -> None:
    with raw_server(liar(lambda _: answer)) as address:
        result = asyncio.run(probe(Question(address, requests=80, seconds=8.0)))
    passed = {f.check.name for f in result.findings if f.outcome.status == "pass"}
    assert not passed & {"temperature", "truncation", "token", "precision", "repeat", "company", "order", "stream"}
    assert result.requests <= 80


def test_the_terminal_gets_nothing_that_acts(capsys: pytest.CaptureFixture[str]) -> None:
    answer = b'{"choices": [{"text": "\\u001b[2J", "logprobs": null}]}'
    with raw_server(liar(lambda _: answer)) as address:
        code = run(["probe", address, "--budget-requests", "60", "--budget-seconds", "8"])
    shown = capsys.readouterr()
    assert code in (1, 3)
    assert "\x1b" not in shown.out + shown.err


def test_nobody_there_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert run(["probe", f"127.0.0.1:{port}"]) == 3
    assert "connection failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["ftp://a:1", "http://", "http://a:99999", "http://a b", "http://u:p@a:1", "http://a:1/?k=v"]
)
def test_bad_addresses_are_usage_errors(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", text]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "u:p" not in error


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/base/v1", "https://h/base"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_read(given: str, address: str) -> None:
    assert parse_address(given) == address


def test_probe_errors_are_one_line() -> None:
    for error in (HttpError("/x", 500, "a b"), TooSlowError("x")):
        assert isinstance(error, ProbeError)
        assert "\n" not in str(error)
