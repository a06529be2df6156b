"""OpenAI-style completions: vLLM (with its extensions) and any other server of that style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerogap.probe.ask import NEUTRAL, Answer, Ask, Token
from zerogap.probe.dialects.base import (
    Dialect,
    as_count,
    as_dict,
    as_ids,
    as_list,
    ids_or_text,
    number,
    salt,
    tops,
)
from zerogap.probe.limits import BadAnswerError, UnsupportedError

_ID = "token_id:"
_STANDARD = ("temperature", "top_p", "frequency_penalty", "presence_penalty")


def read_token(text: Any) -> Token:
    """Return a token as the server names it: an id for vLLM's ``token_id:123``, else its text."""
    if not isinstance(text, str):
        raise BadAnswerError(f"a token is {type(text).__name__}, not text")
    tail = text.removeprefix(_ID)
    return int(tail) if tail is not text and tail.isdigit() else text


class OpenAI(Dialect):
    """A server of OpenAI's style about which nothing else is known."""

    endpoints = ("/v1/completions", "/v1/chat/completions")
    has_ids = False
    alternatives = 5  # the most that OpenAI's completions allow
    penalties = False
    extended = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a completion."""
        found: dict[str, Any] = {"model": self.engine.model, "prompt": ids_or_text(ask.prompt), **self.common(ask)}
        found["logprobs"] = min(ask.alternatives, self.alternatives)
        return found

    def chat(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a chat completion with the prompt as the user's message."""
        if not isinstance(ask.prompt, str):
            raise UnsupportedError("a chat takes no token ids")
        found: dict[str, Any] = {"model": self.engine.model, **self.common(ask)}
        found["messages"] = [{"role": "user", "content": ask.prompt}]
        found["logprobs"] = True
        if ask.alternatives:
            found["top_logprobs"] = min(ask.alternatives, self.alternatives)
        return found

    def common(self, ask: Ask) -> dict[str, Any]:
        """Return what both bodies hold."""
        found: dict[str, Any] = {"max_tokens": ask.max_tokens}
        for name, value in ask.sampling().items():
            if self.extended or name in _STANDARD:
                found[name] = value
            elif value != NEUTRAL[name]:
                raise UnsupportedError(f"an OpenAI-style server takes no {name}")
        if ask.seed is not None:
            found["seed"] = ask.seed
        if ask.stop:
            found["stop"] = list(ask.stop)
        return found

    async def generate(
        self, ask: Ask, *, endpoint: str = "", count: int = 1, stream: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """See the base class."""
        path = endpoint or self.endpoints[0]
        body = self.chat(ask) if path.endswith("/chat/completions") else self.body(ask)
        if count > 1:
            body["n"] = count
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            events = await self.client.events(path, body, timeout_s=timeout_s)
            return [_streamed([as_dict(event, "an event") for event in events])]
        reply = as_dict(await self.client.post(path, body, timeout_s=timeout_s), "the answer")
        choices = as_list(reply.get("choices"), "choices")
        if len(choices) != count:
            raise BadAnswerError(f"{path} answers {len(choices)} choices instead of {count}")
        given = reply.get("usage")
        usage: dict[str, Any] = given if isinstance(given, dict) else {}
        return [_choice(as_dict(choice, "a choice"), usage if count == 1 else {}) for choice in choices]

    async def score(self, ids: Sequence[int], temperature: float = 1.0) -> tuple[float | None, ...]:
        """See the base class."""
        raise UnsupportedError("an OpenAI-style server does not score token ids")

    def wrong_requests(self) -> list[tuple[str, str, Any]]:
        """See the base class."""
        good = {"model": self.engine.model, "prompt": "1", "max_tokens": 1}
        path = self.endpoints[0]
        return [
            ("a model that does not exist", path, good | {"model": "zerogap-no-such-model"}),
            ("a negative max_tokens", path, good | {"max_tokens": -1}),
            ("a temperature that is text", path, good | {"temperature": "hot"}),
            ("no prompt", path, {"model": self.engine.model, "max_tokens": 1}),
        ]


class VLLM(OpenAI):
    """vLLM: token ids both ways, every sampling value, scoring by prompt log-probs, cache salts."""

    has_ids = True
    alternatives = 20  # --max-logprobs
    penalties = True
    extended = True
    salted = True

    def common(self, ask: Ask) -> dict[str, Any]:
        """See the base class."""
        found = super().common(ask)
        found |= {"ignore_eos": ask.ignore_eos, "return_token_ids": True, "return_tokens_as_token_ids": True}
        if ask.cold:
            found["cache_salt"] = salt()
        return found

    async def score(self, ids: Sequence[int], temperature: float = 1.0) -> tuple[float | None, ...]:
        """See the base class."""
        body = self.body(Ask(tuple(ids), 1, temperature=temperature)) | {"prompt_logprobs": 0}
        reply = as_dict(await self.client.post(self.endpoints[0], body), "the answer")
        choice = as_dict(as_list(reply.get("choices"), "choices")[0], "a choice")
        rows = as_list(choice.get("prompt_logprobs"), "prompt_logprobs")
        if len(rows) != len(ids):
            raise BadAnswerError(f"prompt_logprobs has {len(rows)} entries for {len(ids)} tokens")
        return tuple(_scored(row, token) for row, token in zip(rows, ids, strict=True))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See the base class."""
        body = {"model": self.engine.model, "prompt": text, "add_special_tokens": False}
        reply = as_dict(await self.client.post("/tokenize", body), "the answer")
        return as_ids(reply.get("tokens"), "tokens") or ()


def _scored(row: Any, token: int) -> float | None:
    if row is None:
        return None
    entry = as_dict(row, "prompt_logprobs").get(str(token))
    return None if entry is None else number(as_dict(entry, "prompt_logprobs").get("logprob"))


def _choice(choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
    if "message" in choice:
        return _chat_choice(choice, usage)
    given = choice.get("logprobs")
    table = as_dict(given, "logprobs") if given is not None else {}
    tokens = tuple(read_token(token) for token in as_list(table.get("tokens"), "logprobs.tokens"))
    ids = as_ids(choice.get("token_ids"), "token_ids")
    values = tuple(number(value) for value in as_list(table.get("token_logprobs"), "logprobs.token_logprobs"))
    top = tuple(
        tops((read_token(token), value) for token, value in as_dict(row or {}, "logprobs.top_logprobs").items())
        for row in as_list(table.get("top_logprobs"), "logprobs.top_logprobs")
    )
    problems = []
    if given is None:
        problems.append("no log-probs although they were asked for")
    if ids is not None and tokens and tokens != ids:
        problems.append(f"token_ids ({len(ids)}) and the tokens that carry log-probs ({len(tokens)}) differ")
    return Answer(
        str(choice.get("text") or ""),
        ids if ids is not None else tokens,
        values,
        top,
        str(choice.get("finish_reason") or ""),
        as_count(usage.get("completion_tokens")),
        _cached(usage),
        as_ids(choice.get("prompt_token_ids"), "prompt_token_ids"),
        tuple(problems),
    )


def _cached(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return as_count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _chat_choice(choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
    given = choice.get("logprobs")
    rows = as_list(as_dict(given, "logprobs").get("content") if given is not None else None, "logprobs.content")
    rows = [as_dict(row, "logprobs.content") for row in rows]
    tokens = tuple(read_token(row.get("token")) for row in rows)
    message = as_dict(choice.get("message"), "message")
    return Answer(
        str(message.get("content") or ""),
        as_ids(choice.get("token_ids"), "token_ids") or tokens,
        tuple(number(row.get("logprob")) for row in rows),
        tuple(
            tops(
                (read_token(item.get("token")), item.get("logprob")) for item in as_list(row.get("top_logprobs"), "top")
            )
            for row in rows
        ),
        str(choice.get("finish_reason") or ""),
        as_count(usage.get("completion_tokens")),
        _cached(usage),
    )


def _streamed(events: list[dict[str, Any]]) -> Answer:
    """Put the pieces of a stream together as one answer."""
    text, finish = "", ""
    ids: list[int] = []
    tokens: list[Token] = []
    values: list[float | None] = []
    usage: dict[str, Any] = {}
    for event in events:
        if isinstance(event.get("usage"), dict):
            usage = event["usage"]
        if "error" in event:
            raise BadAnswerError("the stream holds an error")
        for choice in as_list(event.get("choices"), "choices"):
            part = _choice(as_dict(choice, "a choice"), {})
            text += part.text
            finish = part.finish or finish
            values += part.logprobs
            if isinstance(choice.get("token_ids"), list):
                ids += choice["token_ids"]
            table = choice.get("logprobs") or {}
            tokens += [read_token(token) for token in table.get("tokens") or []]
    return Answer(
        text, tuple(ids or tokens), tuple(values), (), finish, as_count(usage.get("completion_tokens")), _cached(usage)
    )
