"""Asking an engine over HTTP whether it works: socket, health, counters, and one real token.

``/health`` with 200 proves nothing by itself: it may be answered by a process that does not know its scheduler is gone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from zerogap.errors import UsageError
from zerogap.watchdog.events import Probe

HEALTH_S = 5.0  # an answer to /health takes milliseconds; a loaded machine may need more
TOKENS = tuple(
    f"{engine}:{kind}_tokens_total" for engine in ("sglang", "vllm", "zerogap") for kind in ("generation", "prompt")
)
REQUESTS = ("sglang:num_requests_total", "vllm:request_success_total", "zerogap:requests_total")
RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running", "zerogap:running_requests")
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>[-+\d.eE]+)", re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """How one kind of engine is asked."""

    name: str
    health: str  # path of a health check
    generate: str  # path of a request for one token
    method: str  # of the latter
    body: Callable[[str], dict[str, Any]] | None


def _completion(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}


SGLANG_BODY = {"text": "1", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
KINDS = {
    "sglang": Kind("sglang", "/health", "/health_generate", "GET", None),
    "sglang-generate": Kind("sglang-generate", "/health", "/generate", "POST", lambda model: SGLANG_BODY),
    "vllm": Kind("vllm", "/health", "/v1/completions", "POST", _completion),
    "openai": Kind("openai", "/v1/models", "/v1/completions", "POST", _completion),
    "trl": Kind("trl", "/health/", "/generate/", "POST", lambda model: {"prompts": ["1"], "max_tokens": 1}),
}


def choose_probe(kind: str, version: str = "") -> str:
    """Return the path that shows whether this engine works.

    SGLang's ``/health`` answers 200 without asking the scheduler (always before 0.4.10, later whenever
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION is off, as Miles sets it), so it is never taken as a proof of work.
    """
    return KINDS[kind].generate


def parse_url(text: str) -> str:
    """Return ``http://host:port`` for what a person writes as an engine's address.

    Raises:
        UsageError: saying what is wrong with it.
    """
    if not text.startswith(("http://", "https://")):
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"engine address {text!r}: {error}; write it as http://host:port") from None
    if not parts.hostname or port is None or parts.username:
        raise UsageError(f"engine address {text!r} has no host and port; write it as http://host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def own_addresses() -> set[str]:
    """Return the addresses of this host's interfaces."""
    found = {"127.0.0.1", "::1", "localhost", "0.0.0.0", "::", socket.gethostname()}
    for addresses in psutil.net_if_addrs().values():
        found |= {item.address.split("%")[0] for item in addresses if item.family in (socket.AF_INET, socket.AF_INET6)}
    return found


def is_own(url: str) -> bool:
    """Whether an address found in a log leads to this host, so that it may be probed."""
    host = urlsplit(url).hostname or ""
    try:
        if ipaddress.ip_address(host).is_loopback:
            return True
    except ValueError:
        pass
    return host in own_addresses()


def read_counters(text: str) -> dict[str, float]:
    """Return the sums over labels of the Prometheus samples we know."""
    sums: dict[str, float] = {}
    for found in _SAMPLE.finditer(text):
        if found["name"] in (*TOKENS, *REQUESTS, *RUNNING):
            try:
                sums[found["name"]] = sums.get(found["name"], 0.0) + float(found["value"])
            except ValueError:
                continue
    return sums


@dataclass
class Counted:
    """Counters that moved between two looks at an engine."""

    at: float
    tokens: bool
    requests: bool


@dataclass
class EngineWatch:
    """Probes one engine from a thread of its own and puts what it finds into a queue."""

    url: str
    out: SimpleQueue[Probe | Counted]
    interval_s: float = 5.0
    timeout_s: float = 10.0
    trusted: bool = True  # named by the user; an address from a log must first prove to be an engine
    may_generate: bool = True  # switched off while the engine may rightly not answer
    kind: Kind | None = None
    model: str = ""
    version: str = ""
    identity: tuple[str, str] | None = None
    _counters: dict[str, float] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Event = field(default_factory=threading.Event)
    _ever: bool = False

    def start(self) -> None:
        """Begin probing."""
        threading.Thread(target=self._loop, daemon=True).start()

    def stop(self) -> None:
        """End probing."""
        self._stop.set()
        self._wake.set()

    def now(self) -> None:
        """Probe at once: something happened."""
        self._wake.set()

    def _loop(self) -> None:
        with httpx.Client(timeout=min(HEALTH_S, self.timeout_s), trust_env=False, follow_redirects=False) as client:
            while not self._stop.is_set():
                probe = self.ask(client)
                if self.trusted or self.kind is not None:
                    self.out.put(probe)
                self._wake.wait(self.interval_s if probe.ok else min(1.0, self.interval_s))
                self._wake.clear()

    def ask(self, client: httpx.Client) -> Probe:
        """Put one round of questions to the engine and return the answer to the last one asked."""
        try:
            return self._ask(client)
        except httpx.ConnectError as error:
            return self._failed("socket", f"connection failed: {_words(error)}", refused=True)
        except httpx.TimeoutException:
            return self._failed("socket", "no answer in time")
        except (httpx.HTTPError, OSError, ValueError) as error:
            return self._failed("socket", f"connection broken: {_words(error)}")

    def _ask(self, client: httpx.Client) -> Probe:
        if self.kind is None:
            found = detect(client, self.url)
            if found is None:
                # Someone listens; until it says what it is, only its health can be asked.
                answer = client.get(f"{self.url}/health")
                if answer.status_code != 200:
                    return self._failed("health", f"/health answers {answer.status_code}")
                return Probe(time.time(), self.url, "health", True)
            self.kind, self.model, self.version = found
            self.identity = (self.kind.name.removesuffix("-generate"), self.model)
        busy = self._count(client)
        answer = client.get(f"{self.url}{self.kind.health}")
        if answer.status_code != 200 and not busy:
            return self._failed(
                "health",
                f"{self.kind.health} answers {answer.status_code}",
                other=self._other(client, answer.status_code),
            )
        if busy:
            self._ever = True
            return Probe(time.time(), self.url, "generate", True, "its counters move", busy=True)
        if not self.may_generate:
            return Probe(time.time(), self.url, "health", True)
        return self._generate(client)

    def _generate(self, client: httpx.Client) -> Probe:
        assert self.kind is not None
        path = choose_probe(self.kind.name, self.version)
        body = self.kind.body(self.model) if self.kind.body else None
        try:
            answer = client.request(self.kind.method, f"{self.url}{path}", json=body, timeout=self.timeout_s)
        except httpx.TimeoutException:
            return self._failed("generate", f"{path} gave no token in {self.timeout_s:g} s, its health check answers")
        if answer.status_code != 200:
            if answer.status_code == 404 and self.kind.name == "sglang" and not self._other(client, 404):
                self.kind = KINDS["sglang-generate"]
                return self._generate(client)
            return self._failed(
                "generate", f"{path} answers {answer.status_code}", other=self._other(client, answer.status_code)
            )
        if self.identity and self._other(client):
            return self._failed("generate", "another server answers here", other=True)
        self._ever = True
        return Probe(time.time(), self.url, "generate", True)

    def _other(self, client: httpx.Client, status: int = 200) -> bool:
        """Whether somebody else answers here than at first: another identity, or one that does not know the paths."""
        if self.identity is None:
            return False
        found = detect(client, self.url)
        if found is None:
            return status in (404, 405, 501)
        return (found[0].name.removesuffix("-generate"), found[1]) != self.identity

    def _failed(self, level: str, detail: str, refused: bool = False, other: bool = False) -> Probe:
        return Probe(time.time(), self.url, level, False, detail, refused=refused, changed=other and self._ever)

    def _count(self, client: httpx.Client) -> bool:
        """Read the engine's counters, report their movement, and return whether it is at work."""
        answer = client.get(f"{self.url}/metrics")
        if answer.status_code != 200 or not answer.text:
            return False
        now, before = read_counters(answer.text), self._counters
        self._counters = now
        if not before:
            return False
        tokens = any(now.get(name, 0) > before.get(name, 0) for name in TOKENS)
        requests = any(now.get(name, 0) > before.get(name, 0) for name in REQUESTS)
        if tokens or requests:
            self.out.put(Counted(time.time(), tokens, requests))
        return tokens or requests


def detect(client: httpx.Client, url: str) -> tuple[Kind, str, str] | None:
    """Return (kind, model, version) of the engine at ``url``, None if it is none that we know."""
    for path in ("/server_info", "/get_server_info", "/get_model_info"):
        answer = _json(client, url + path)
        if answer is not None and ("model_path" in answer or "sglang_version" in answer):
            return KINDS["sglang"], str(answer.get("model_path", "")), str(answer.get("version", ""))
    version = _json(client, f"{url}/version")
    models = _json(client, f"{url}/v1/models")
    if models is not None and isinstance(models.get("data"), list) and models["data"]:
        model = str(models["data"][0].get("id", "")) if isinstance(models["data"][0], dict) else ""
        kind = "vllm" if version is not None and "version" in version else "openai"
        return KINDS[kind], model, str((version or {}).get("version", ""))
    if (world := _json(client, f"{url}/get_world_size/")) is not None and "world_size" in world:
        return KINDS["trl"], "", ""
    return None


def _json(client: httpx.Client, url: str) -> dict[str, Any] | None:
    answer = client.get(url)
    if answer.status_code != 200:
        return None
    try:
        body = answer.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _words(error: Exception) -> str:
    return str(error).split("\n")[0][:200] or type(error).__name__
