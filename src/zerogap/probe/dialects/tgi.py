"""Hugging Face's text-generation-inference: ``/generate`` with details."""

from __future__ import annotations

from typing import Any

from zerogap.probe.ask import NEUTRAL, Answer, Ask
from zerogap.probe.dialects.base import Dialect, as_count, as_dict, as_list, number, tops
from zerogap.probe.dialects.openai import OpenAI
from zerogap.probe.limits import UnsupportedError


class TGI(Dialect):
    """Prompts are text, answers hold token ids; no scoring of given ids."""

    endpoints = ("/generate", "/v1/chat/completions")
    has_ids = False
    alternatives = 5
    penalties = False
    several = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of ``/generate``."""
        if not isinstance(ask.prompt, str):
            raise UnsupportedError("TGI takes no token ids")
        params: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "details": True}
        if ask.temperature is not None:
            params["do_sample"] = ask.temperature > 0
        for name, value in ask.sampling().items():
            if name == "temperature" and value == 0.0:
                continue
            if value == NEUTRAL[name] and name != "temperature":
                continue  # TGI refuses the values that stand for "off" elsewhere
            if name in ("min_p", "presence_penalty"):
                raise UnsupportedError(f"TGI takes no {name}")
            params[name] = value
        if ask.alternatives:
            params["top_n_tokens"] = min(ask.alternatives, self.alternatives)
        if ask.seed is not None:
            params["seed"] = ask.seed
        if ask.stop:
            params["stop"] = list(ask.stop)
        return {"inputs": ask.prompt, "parameters": params}

    async def generate(
        self, ask: Ask, *, endpoint: str = "", count: int = 1, stream: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """See the base class."""
        if endpoint not in ("", "/generate"):
            return await OpenAI(self.client, self.engine).generate(
                ask, endpoint=endpoint, count=count, stream=stream, timeout_s=timeout_s
            )
        if count > 1:
            raise UnsupportedError("TGI's /generate gives one answer a request")
        if not stream:
            return [_answer(await self.client.post("/generate", self.body(ask), timeout_s=timeout_s))]
        events = [as_dict(event, "an event") for event in await self.client.events("/generate_stream", self.body(ask))]
        tokens = [as_dict(event.get("token"), "a token") for event in events if event.get("token")]
        last = events[-1] if events else {}
        details = {**(last.get("details") or {}), "tokens": tokens}
        return [_answer({"generated_text": last.get("generated_text"), "details": details})]

    def wrong_requests(self) -> list[tuple[str, str, Any]]:
        """See the base class."""
        return [
            ("no prompt", "/generate", {"parameters": {"max_new_tokens": 1}}),
            ("a temperature below 0", "/generate", {"inputs": "1", "parameters": {"temperature": -1.0}}),
        ]


def _answer(reply: Any) -> Answer:
    found = as_dict(reply[0] if isinstance(reply, list) and reply else reply, "the answer")
    given = found.get("details")
    details = as_dict(given, "details") if given is not None else {}
    rows = [as_dict(row, "details.tokens") for row in as_list(details.get("tokens"), "details.tokens")]
    top = tuple(
        tops((item.get("id"), item.get("logprob")) for item in as_list(position, "top_tokens"))
        for position in as_list(details.get("top_tokens"), "top_tokens")
    )
    return Answer(
        str(found.get("generated_text") or ""),
        tuple(row.get("id", str(row.get("text", ""))) for row in rows),
        tuple(number(row.get("logprob")) for row in rows),
        top,
        {"eos_token": "stop", "stop_sequence": "stop"}.get(
            str(details.get("finish_reason")), str(details.get("finish_reason") or "")
        ),
        as_count(details.get("generated_tokens")),
        None,
        None,
        () if given is not None else ("no log-probs although they were asked for",),
    )
