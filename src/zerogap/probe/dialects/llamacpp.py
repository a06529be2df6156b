"""llama.cpp's server: ``/completion`` with ``n_probs``."""

from __future__ import annotations

from typing import Any

from zerogap.probe.ask import Answer, Ask, Token
from zerogap.probe.dialects.base import Dialect, as_count, as_dict, as_ids, as_list, ids_or_text, number, tops
from zerogap.probe.dialects.openai import OpenAI
from zerogap.probe.limits import UnsupportedError

_WHOLE = 65536  # penalties look back over the whole context; some builds refuse -1


class LlamaCpp(Dialect):
    """Token ids both ways; no scoring of a given text."""

    endpoints = ("/completion", "/v1/completions", "/v1/chat/completions")
    alternatives = 20
    salted = True
    several = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of ``/completion``; every sampler of llama.cpp that is on by default is turned off."""
        found: dict[str, Any] = {"prompt": ids_or_text(ask.prompt), "n_predict": ask.max_tokens}
        found |= {"n_probs": max(1, ask.alternatives), "return_tokens": True, "ignore_eos": ask.ignore_eos}
        found["cache_prompt"] = not ask.cold
        names = {"repetition_penalty": "repeat_penalty"}
        found |= {names.get(name, name): value for name, value in ask.sampling().items()}
        if ask.repetition_penalty is not None:
            found["repeat_last_n"] = _WHOLE
        if ask.seed is not None:
            found["seed"] = ask.seed
        if ask.stop:
            found["stop"] = list(ask.stop)
        return found

    async def generate(
        self, ask: Ask, *, endpoint: str = "", count: int = 1, stream: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """See the base class."""
        if endpoint not in ("", "/completion"):
            return await OpenAI(self.client, self.engine).generate(
                ask.but(ignore_eos=False), endpoint=endpoint, count=count, stream=stream, timeout_s=timeout_s
            )
        if count > 1:
            raise UnsupportedError("llama.cpp's /completion gives one answer a request")
        if not stream:
            return [_answer(await self.client.post("/completion", self.body(ask), timeout_s=timeout_s), ask)]
        events = await self.client.events("/completion", self.body(ask) | {"stream": True}, timeout_s=timeout_s)
        parts = [as_dict(event, "an event") for event in events]
        whole: dict[str, Any] = dict(parts[-1]) if parts else {}
        whole["content"] = "".join(str(part.get("content") or "") for part in parts)
        whole["tokens"] = [token for part in parts for token in part.get("tokens") or []]
        whole["completion_probabilities"] = [
            row for part in parts for row in part.get("completion_probabilities") or []
        ]
        return [_answer(whole, ask)]

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See the base class."""
        reply = as_dict(await self.client.post("/tokenize", {"content": text, "add_special": False}), "the answer")
        return as_ids(reply.get("tokens"), "tokens") or ()

    def wrong_requests(self) -> list[tuple[str, str, Any]]:
        """See the base class."""
        return [
            ("no prompt", "/completion", {"n_predict": 1}),
            ("a temperature that is text", "/completion", {"prompt": "1", "n_predict": 1, "temperature": "hot"}),
        ]


def _answer(reply: Any, ask: Ask) -> Answer:
    found = as_dict(reply, "the answer")
    rows = [as_dict(row, "log-probs") for row in as_list(found.get("completion_probabilities"), "log-probs")]
    carried: tuple[Token, ...] = tuple(row.get("id", str(row.get("token", ""))) for row in rows)
    ids = as_ids(found.get("tokens"), "tokens")
    top = tuple(
        tops(
            (item.get("id", str(item.get("token"))), item.get("logprob"))
            for item in as_list(row.get("top_logprobs"), "top")
        )
        for row in rows
    )
    problems = []
    if not rows and ask.max_tokens:
        problems.append("no log-probs although they were asked for")
    if ids and carried and ids != carried:
        problems.append(f"tokens ({len(ids)}) and the tokens that carry log-probs ({len(carried)}) differ")
    stop = found.get("stop_type") or ""
    return Answer(
        str(found.get("content") or ""),
        ids or carried,
        tuple(number(row.get("logprob")) for row in rows),
        top if ask.alternatives else (),
        {"limit": "length", "word": "stop", "eos": "stop"}.get(str(stop), str(stop)),
        as_count(found.get("tokens_predicted")),
        as_count(found.get("tokens_cached")) if not ask.cold else 0,
        None,
        tuple(problems),
    )
