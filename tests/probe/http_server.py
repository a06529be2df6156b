"""HTTP in front of the test engine: parses each dialect's requests and writes each dialect's answers."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests.probe.engine_server import OFF, BadRequestError, Engine, Row, Truth

NAMES = {"repeat_penalty": "repetition_penalty"}


def bf16(value: float) -> float:
    """Round to the nearest bfloat16."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


def told(engine: Any, row: Row) -> tuple[list[int], list[Any], list[list[tuple[int, Any]]]]:
    """Return the tokens, log-probs and alternatives of a finished row as the engine tells them, lies included."""
    tokens, values, tops = list(row.tokens), list(row.logprobs), [list(t) for t in row.tops]
    lie = engine.truth.logprob
    if lie == "shift":
        values = [-1.0, *values[:-1]]
    elif lie in ("bf16", "fp16", "decimals"):
        rounding = {"bf16": bf16, "fp16": lambda v: float(np.float16(v)), "decimals": lambda v: round(v, 3)}[lie]
        values = [rounding(v) for v in values]
        tops = [[(t, rounding(v)) for t, v in top] for top in tops]
    elif lie == "list":
        for top in tops:
            total = math.log(sum(math.exp(v) for _, v in top)) if top else 0.0
            top[:] = [(t, v - total) for t, v in top]
    elif lie == "pad":
        values = [v if n < len(values) - 5 else 0.0 for n, v in enumerate(values)]
    elif lie == "short":
        values = values[:-1] if len(values) > 1 else values
    elif lie == "null and nan":
        values = [{1: None, 2: math.nan}.get(n, v) for n, v in enumerate(values)]
    elif lie in ("null", "nan", "sentinel", "neginf"):
        filler = {"null": None, "nan": math.nan, "sentinel": -9999.0, "neginf": -math.inf}[lie]
        values = [filler if n == 3 else v for n, v in enumerate(values)]
    if engine.truth.retokenise:
        tokens = engine.encode(engine.decode(tokens))
    return tokens, values, tops


class Handler(BaseHTTPRequestHandler):
    """One request to the engine that the server holds."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def engine(self) -> Any:
        return self.server.engine

    @property
    def truth(self) -> Truth:
        return self.engine.truth

    def reply(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        kind, path = self.truth.kind, self.path
        pages: dict[str, Any] = {"/health": {}}
        if kind == "sglang":
            pages["/server_info"] = {"model_path": "tiny", "version": "0.5.19", **self.truth.facts}
        elif kind == "zerogap":
            pages["/server_info"] = {"model_path": "tiny", "zerogap_version": "0.1.0"}
        elif kind == "llamacpp":
            pages["/props"] = {"default_generation_settings": {}, "total_slots": 4, "build_info": "b6000"}
        elif kind == "tgi":
            pages["/info"] = {
                "model_id": "tiny",
                "version": "3.3.6",
                "max_total_tokens": self.engine.length,
                "model_dtype": "float32",
            }
        elif kind == "vllm":
            pages["/version"] = {"version": "0.32.0"}
        if kind in ("vllm", "openai", "llamacpp"):
            owner = {"vllm": "vllm", "llamacpp": "llamacpp"}.get(kind, "someone")
            pages["/v1/models"] = {"data": [{"id": "tiny", "owned_by": owner, "max_model_len": self.engine.length}]}
        if self.engine.dead and self.truth.die_at_first:
            return self.reply({"error": "engine dead"}, 503)
        if path in pages:
            return self.reply(pages[path])
        return self.reply({"error": "not found"}, 404)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        truth, engine = self.truth, self.engine
        if truth.slow_s:
            time.sleep(truth.slow_s)
        if truth.key and self.headers.get("Authorization") != f"Bearer {truth.key}":
            return self.reply({"error": "unauthorised"}, 401)
        chance = engine.chaos.random()
        if chance < truth.broken_share:
            return self.reply({"error": "internal"}, 500)
        if chance < truth.rate_limit:
            return self.reply({"error": "slow down"}, 429, {"Retry-After": "0"})
        try:
            try:
                body = json.loads(data)
            except ValueError:
                raise BadRequestError("not JSON") from None
            self.route(body)
        except BadRequestError as error:
            self.reply({"error": str(error)}, 404 if "model" in str(error) else 500 if truth.errors_as_500 else 400)
        except RuntimeError as error:
            self.reply({"error": str(error)}, 500)

    def route(self, body: dict[str, Any]) -> None:
        truth, engine = self.truth, self.engine
        if self.path == "/tokenize":
            return self.reply({"tokens": self.engine.encode(body.get("prompt", body.get("content", "")))})
        if truth.health_only:
            raise RuntimeError("EngineCore encountered an issue")
        if truth.die_at_first:
            engine.dead = True
            raise RuntimeError("'function' object is not subscriptable")
        if truth.hang:
            time.sleep(60)
        native = {"sglang": "/generate", "zerogap": "/generate", "llamacpp": "/completion", "tgi": "/generate"}.get(
            truth.kind
        )
        streaming = self.path == "/generate_stream"
        if self.path not in (native, "/v1/completions", "/v1/chat/completions") and not streaming:
            return self.reply({"error": "not found"}, 404)
        rows = self.rows(body)
        if truth.logprob == "json" and rows[0].params["top_p"] < 0.5 and rows[0].top:
            raise RuntimeError("Out of range float values are not JSON compliant: -inf")
        engine.submit(rows)
        for row in rows:
            row.done.wait(60)
        if not rows[0].finish:
            raise RuntimeError("engine stopped")
        if body.get("stream") or streaming:
            return self.stream(body, rows[0])
        return self.reply(self.answer(body, rows))

    def rows(self, body: dict[str, Any]) -> list[Row]:
        """Return the sequences that a request asks for."""
        kind = self.truth.kind
        native = not self.path.startswith("/v1/")
        given = body
        if native and kind in ("sglang", "zerogap"):
            given = body.get("sampling_params", {})
        elif native and kind == "tgi":
            given = body.get("parameters", {})
        elif body.get("model") != "tiny" and "model" in body:
            raise BadRequestError("no such model")
        prompt = body.get("input_ids", body.get("text", body.get("inputs", body.get("prompt"))))
        if "messages" in body:
            prompt = "user: " + body["messages"][0]["content"] + "\nassistant:"
        if prompt is None:
            raise BadRequestError("no prompt")
        ids = self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
        limit = given.get("max_tokens", given.get("max_new_tokens", given.get("n_predict", 16)))
        if (
            not isinstance(limit, int)
            or limit < 0
            or not all(isinstance(t, int) and 0 <= t < self.engine.vocabulary for t in ids)
        ):
            raise BadRequestError("bad value")
        if len(ids) + limit > self.engine.length:
            raise BadRequestError("prompt too long")
        params = dict(OFF)
        params.update(self.truth.default)
        for name, value in given.items():
            name = NAMES.get(name, name)
            if name in OFF:
                if isinstance(value, str) or value is None or (name == "temperature" and value < 0):
                    raise BadRequestError("bad value")
                params[name] = value
        if native and kind == "tgi" and not given.get("do_sample", self.truth.default != {}):
            params["temperature"] = 0.0 if "do_sample" in given else 1.0
        if body.get("cache_salt") or body.get("cache_prompt") is False:
            params["_salt"] = 1.0
        seed = given.get("seed", given.get("sampling_seed"))
        if self.truth.ignore_seed == "random" or self.path not in self.truth.seed_endpoints:
            seed = None
        elif self.truth.ignore_seed == "constant":
            seed = 42
        top = body.get(
            "top_logprobs_num",
            body.get("n_probs", given.get("top_n_tokens", body.get("top_logprobs", body.get("logprobs")))),
        )
        top = 0 if top in (None, True, False) else int(top)
        stop = given.get("stop") or []
        count = given.get("n", 1)
        return [
            Row(ids, dict(params), None if seed is None else seed * 1000 + n, limit, top, bool(given.get("ignore_eos")),
                [stop] if isinstance(stop, str) else list(stop))
            for n in range(count)
        ]  # fmt: skip

    def text(self, row: Row) -> str:
        text = self.engine.decode(row.tokens)
        for stop in [] if self.truth.stop_kept else row.stop:
            text = text.partition(stop)[0]
        return text

    def answer(self, body: dict[str, Any], rows: list[Row]) -> Any:
        truth, native = self.truth, not self.path.startswith("/v1/")
        if native and truth.kind in ("sglang", "zerogap"):
            made = [self.sglang(body, row) for row in rows]
            return made[0] if len(made) == 1 else made
        if native and truth.kind == "llamacpp":
            return self.llamacpp(rows[0])
        if native and truth.kind == "tgi":
            return self.tgi(rows[0])
        if self.path.endswith("/chat/completions"):
            choices = [self.chat(body, row, n) for n, row in enumerate(rows)]
        else:
            choices = [self.choice(body, row, n) for n, row in enumerate(rows)]
        usage = {"completion_tokens": sum(len(row.tokens) for row in rows), "prompt_tokens": len(rows[0].prompt)}
        usage["prompt_tokens_details"] = {"cached_tokens": rows[0].cached}
        return {"object": "text_completion", "choices": choices, "usage": usage}

    def name(self, body: dict[str, Any], token: int) -> str:
        return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else self.engine.decode([token])

    def choice(self, body: dict[str, Any], row: Row, index: int) -> dict[str, Any]:
        tokens, values, tops = told(self.engine, row)
        found: dict[str, Any] = {"index": index, "text": self.text(row), "finish_reason": row.finish}
        if body.get("logprobs") is not None and self.truth.logprob != "missing":
            found["logprobs"] = {"tokens": [self.name(body, t) for t in row.tokens], "token_logprobs": values}
            if row.top:
                found["logprobs"]["top_logprobs"] = [{self.name(body, t): v for t, v in top} for top in tops]
        else:
            found["logprobs"] = None
        if body.get("return_token_ids"):
            found["token_ids"], found["prompt_token_ids"] = tokens, row.prompt
            if self.truth.retokenise and found["logprobs"]:
                found["logprobs"]["tokens"] = [self.name(body, t) for t in tokens]
        if body.get("prompt_logprobs") is not None:
            scored = self.engine.score(row.prompt, row.params["temperature"])
            found["prompt_logprobs"] = [
                None if v is None else {str(t): {"logprob": v}} for t, v in zip(row.prompt, scored, strict=True)
            ]
        return found

    def chat(self, body: dict[str, Any], row: Row, index: int) -> dict[str, Any]:
        tokens, values, tops = told(self.engine, row)
        content = [
            {
                "token": self.name(body, t),
                "logprob": v,
                "top_logprobs": [{"token": self.name(body, a), "logprob": b} for a, b in top],
            }
            for t, v, top in zip(tokens, values, tops, strict=False)
        ]
        message = {"role": "assistant", "content": self.text(row)}
        return {"index": index, "message": message, "logprobs": {"content": content}, "finish_reason": row.finish}

    def sglang(self, body: dict[str, Any], row: Row) -> dict[str, Any]:
        tokens, values, tops = told(self.engine, row)
        meta: dict[str, Any] = {
            "finish_reason": {"type": row.finish},
            "completion_tokens": len(row.tokens),
            "cached_tokens": row.cached,
        }
        meta["output_token_logprobs"] = [[v, t, None] for v, t in zip(values, row.tokens, strict=False)]
        meta["output_top_logprobs"] = [[[v, t, None] for t, v in top] for top in tops]
        if body.get("logprob_start_len") == 0:
            scored = self.engine.score(row.prompt, row.params["temperature"])
            meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(scored, row.prompt, strict=True)]
        return {"text": self.text(row), "output_ids": tokens, "meta_info": meta}

    def llamacpp(self, row: Row) -> dict[str, Any]:
        tokens, values, tops = told(self.engine, row)
        probabilities = [
            {
                "id": t,
                "token": self.engine.decode([t]),
                "logprob": v,
                "top_logprobs": [{"id": a, "token": self.engine.decode([a]), "logprob": b} for a, b in top],
            }
            for t, v, top in zip(tokens, values, tops, strict=False)
        ]
        stop = {"length": "limit", "stop": "word"}[row.finish]
        return {"content": self.text(row), "tokens": tokens, "completion_probabilities": probabilities,
                "tokens_predicted": len(row.tokens), "stop_type": stop}  # fmt: skip

    def tgi(self, row: Row) -> dict[str, Any]:
        tokens, values, tops = told(self.engine, row)
        details = {
            "finish_reason": "length" if row.finish == "length" else "stop_sequence",
            "generated_tokens": len(row.tokens),
            "tokens": [
                {"id": t, "text": self.engine.decode([t]), "logprob": v} for t, v in zip(tokens, values, strict=False)
            ],
            "top_tokens": [[{"id": t, "logprob": v} for t, v in top] for top in tops],
        }
        return {"generated_text": self.text(row), "details": details}

    def stream(self, body: dict[str, Any], row: Row) -> None:
        if self.truth.stream_differs:
            row.tokens[-1] = (row.tokens[-1] + 1) % 256
        whole = self.answer(body, [row])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in self.events(whole, row):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def events(self, whole: Any, row: Row) -> Iterator[Any]:
        kind = self.truth.kind
        if "choices" in whole and "text" in whole["choices"][0]:
            choice = whole["choices"][0]
            table = choice["logprobs"]
            for n in range(len(row.tokens)):
                last = n == len(row.tokens) - 1
                part = {
                    "index": 0,
                    "text": self.engine.decode(row.tokens[n : n + 1]),
                    "finish_reason": row.finish if last else None,
                }
                if table:
                    part["logprobs"] = {
                        "tokens": table["tokens"][n : n + 1],
                        "token_logprobs": table["token_logprobs"][n : n + 1],
                    }
                if "token_ids" in choice:
                    part["token_ids"] = choice["token_ids"][n : n + 1]
                yield {"choices": [part]}
            yield {"choices": [], "usage": whole["usage"]}
        elif kind == "tgi":
            tokens = whole["details"]["tokens"]
            for n, token in enumerate(tokens):
                last = n == len(tokens) - 1
                end = {"finish_reason": whole["details"]["finish_reason"], "generated_tokens": len(tokens)}
                yield {
                    "token": token,
                    "generated_text": whole["generated_text"] if last else None,
                    "details": end if last else None,
                }
        else:
            yield whole


@contextmanager
def serve(truth: Truth, made: Any = None) -> Iterator[str]:
    """Run an engine behind a free port and give its address; by default the test engine that behaves as ``truth``."""
    engine = made or Engine(truth)
    server = _Server(("127.0.0.1", 0), Handler)
    server.engine = engine
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        engine.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    engine: Any

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of these tests; a trace of it would land in some later test's stderr."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
