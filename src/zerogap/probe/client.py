"""HTTP to one address and no other, in bounded memory and time, whatever the other side sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from zerogap.console import printable
from zerogap.errors import UsageError
from zerogap.probe.limits import (
    BODY_BYTES,
    EXCERPT_CHARS,
    BadAnswerError,
    Budget,
    BudgetSpentError,
    HttpError,
    TooSlowError,
    UnreachableError,
)

_BUSY = (429, 503)  # the only answers that are asked again, and only as the other side allows
_BUSY_TRIES = 3
_BUSY_WAIT_S = 2.0


def parse_address(text: str) -> str:
    """Return ``scheme://host[:port][/base]`` for what a person writes as an engine's address.

    Raises:
        UsageError: saying what is wrong with it.
    """
    given = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"address {text!r}: {error}; write it as http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in given):
        raise UsageError(f"address {text!r} is no http address; write it as http://host:port")
    if parts.username or parts.password:
        raise UsageError(f"address of {parts.hostname}: it holds a password; give a key in ZEROGAP_PROBE_KEY instead")
    if parts.query or parts.fragment:
        raise UsageError(f"address {text!r} has a query; write it as http://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{base}"


@dataclass(frozen=True)
class Reply:
    """One whole answer.

    Attributes:
        status: HTTP status.
        headers: response headers, names in lower case.
        body: at most ``BODY_BYTES`` bytes.
    """

    path: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON (NaN and Infinity allowed: engines write them).

        Raises:
            BadAnswerError: it is none.
        """
        return parse_json(self.path, self.body)

    def excerpt(self) -> str:
        """Return the start of the body on one line, inert."""
        return excerpt(self.body)


def parse_json(path: str, body: bytes) -> Any:
    """Return ``body`` as JSON.

    Raises:
        BadAnswerError: it is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise BadAnswerError(f"{path} answers with something that is not JSON: {excerpt(body) or 'nothing'}") from None


def excerpt(body: bytes) -> str:
    """Return the start of what a server sent on one line, with nothing that a terminal or a page would act on."""
    text = body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace")
    return printable(" ".join(text.split()))[:EXCERPT_CHARS]


class Client:
    """Requests to ``base`` only; redirects are never followed, proxies of the environment never used."""

    def __init__(self, base: str, budget: Budget, *, key: str = "", timeout_s: float = 30.0) -> None:
        self.base = base
        self.budget = budget
        self.timeout_s = timeout_s
        headers = {"Accept-Encoding": "identity", "User-Agent": "zerogap-probe"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=128, max_keepalive_connections=64),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def get(self, path: str, *, timeout_s: float | None = None) -> Reply:
        """GET ``path`` and return the answer of any status but a redirect."""
        return await self.request("GET", path, timeout_s=timeout_s)

    async def request(
        self, method: str, path: str, body: Any = None, *, content: bytes | None = None, timeout_s: float | None = None
    ) -> Reply:
        """Send one request and read one whole answer.

        Raises:
            ProbeError: budget, time, size or connection.
        """
        data = bytearray()
        async with self._open(method, path, body, content, timeout_s) as response:
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > BODY_BYTES:
                    raise BadAnswerError(f"{path} sent more than {BODY_BYTES >> 20} MB; the rest was not read")
            return Reply(path, response.status_code, dict(response.headers), bytes(data))

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        """POST JSON and return the JSON of a 200 answer; a busy server is asked again a few times.

        Raises:
            HttpError: any other status.
            ProbeError: budget, time, size, form or connection.
        """
        for attempt in range(_BUSY_TRIES):
            reply = await self.request("POST", path, body, timeout_s=timeout_s)
            if reply.status == 200:
                return reply.json()
            after = reply.headers.get("retry-after", "")
            if reply.status not in _BUSY or not after or attempt == _BUSY_TRIES - 1:
                break
            await asyncio.sleep(min(_BUSY_WAIT_S, float(after) if after.isdigit() else 1.0))
        raise HttpError(path, reply.status, reply.excerpt(), after)

    async def events(self, path: str, body: Any, *, timeout_s: float | None = None) -> list[Any]:
        """POST JSON and return the data of every server-sent event, up to ``[DONE]`` or the end."""
        found: list[Any] = []
        read, rest = 0, b""
        async with self._open("POST", path, body, None, timeout_s) as response:
            failed = response.status_code != 200
            async for chunk in response.aiter_raw():
                read += len(chunk)
                rest += chunk
                if read > BODY_BYTES or len(rest) > BODY_BYTES:
                    raise BadAnswerError(f"{path} streamed more than {BODY_BYTES >> 20} MB; the rest was not read")
                if failed:
                    continue
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return found
                    if line.startswith(b"data:"):
                        found.append(parse_json(path, data))
            if failed:
                raise HttpError(path, response.status_code, excerpt(rest))
        return found

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Any, content: bytes | None, timeout_s: float | None
    ) -> AsyncIterator[httpx.Response]:
        self.budget.take()
        wanted = self.timeout_s if timeout_s is None else timeout_s
        allowed = min(wanted, self.budget.left_s)
        arguments: dict[str, Any] = {}
        if content is not None:
            arguments = {"content": content, "headers": {"Content-Type": "application/json"}}
        elif body is not None:
            arguments = {"json": body}
        try:
            # httpx's own timeouts start again at every byte; this one does not.
            async with asyncio.timeout(allowed), self._http.stream(method, f"{self.base}{path}", **arguments) as reply:
                if 300 <= reply.status_code < 400:
                    target = excerpt(reply.headers.get("location", "").encode())
                    raise BadAnswerError(f"{path} redirects to {target or 'nowhere'}; redirects are not followed")
                if reply.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
                    raise BadAnswerError(f"{path} answers compressed although that was not asked for")
                yield reply
        except TimeoutError:
            if allowed < wanted:
                raise BudgetSpentError(
                    f"the budget of {self.budget.seconds:g} s is used up (--budget-seconds)"
                ) from None
            raise TooSlowError(f"{path} gave no whole answer in {allowed:g} s") from None
        except httpx.TimeoutException:
            raise TooSlowError(f"{path} gave no answer in {allowed:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = excerpt(str(error).encode()) or type(error).__name__
            raise UnreachableError(f"{path}: connection failed ({words})") from None
