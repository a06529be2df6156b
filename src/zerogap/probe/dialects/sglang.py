"""SGLang's native ``/generate``, which ``zerogap serve`` speaks as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerogap.probe.ask import Answer, Ask, Token
from zerogap.probe.dialects.base import Dialect, as_count, as_dict, as_ids, as_list, number, tops
from zerogap.probe.dialects.openai import OpenAI
from zerogap.probe.limits import BadAnswerError


class SGLang(Dialect):
    """Token ids both ways, log-probs of output and input, sampling seeds; OpenAI-style endpoints beside it."""

    endpoints = ("/generate", "/v1/completions", "/v1/chat/completions")
    alternatives = 20

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of ``/generate``."""
        params: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "ignore_eos": ask.ignore_eos}
        params |= ask.sampling()
        if params.get("top_k") == 0:
            params["top_k"] = -1  # SGLang's word for off
        if ask.seed is not None:
            params["sampling_seed"] = ask.seed
        if ask.stop:
            params["stop"] = list(ask.stop)
        found: dict[str, Any] = {"sampling_params": params, "return_logprob": True}
        found["top_logprobs_num"] = ask.alternatives
        if isinstance(ask.prompt, str):
            found["text"] = ask.prompt
        else:
            found["input_ids"] = list(ask.prompt)
        return found

    async def generate(
        self, ask: Ask, *, endpoint: str = "", count: int = 1, stream: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """See the base class."""
        if endpoint not in ("", "/generate"):
            return await OpenAI(self.client, self.engine).generate(
                ask.but(ignore_eos=False), endpoint=endpoint, count=count, stream=stream, timeout_s=timeout_s
            )
        body = self.body(ask)
        if count > 1:
            body["sampling_params"]["n"] = count
        if stream:
            # Every event holds the whole answer so far.
            events = await self.client.events("/generate", body | {"stream": True}, timeout_s=timeout_s)
            if not events:
                raise BadAnswerError("the stream holds no event")
            return [_answer(events[-1], ask)]
        reply = await self.client.post("/generate", body, timeout_s=timeout_s)
        replies = reply if isinstance(reply, list) else [reply]
        if len(replies) != count:
            raise BadAnswerError(f"/generate answers {len(replies)} sequences instead of {count}")
        return [_answer(item, ask) for item in replies]

    async def score(self, ids: Sequence[int], temperature: float = 1.0) -> tuple[float | None, ...]:
        """See the base class."""
        body = self.body(Ask(tuple(ids), 1, temperature=temperature)) | {"logprob_start_len": 0}
        meta = as_dict(as_dict(await self.client.post("/generate", body), "the answer").get("meta_info"), "meta_info")
        rows = as_list(meta.get("input_token_logprobs"), "input_token_logprobs")
        if len(rows) != len(ids):
            raise BadAnswerError(f"input_token_logprobs has {len(rows)} entries for {len(ids)} tokens")
        return tuple(number(as_list(row, "input_token_logprobs")[0]) for row in rows)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See the base class; the prompt's ids are read from its log-probs, which every version gives."""
        body = self.body(Ask(text, 1)) | {"logprob_start_len": 0}
        meta = as_dict(as_dict(await self.client.post("/generate", body), "the answer").get("meta_info"), "meta_info")
        rows = as_list(meta.get("input_token_logprobs"), "input_token_logprobs")
        return as_ids([as_list(row, "input_token_logprobs")[1] for row in rows], "input_token_logprobs") or ()

    def wrong_requests(self) -> list[tuple[str, str, Any]]:
        """See the base class."""
        return [
            ("a negative max_new_tokens", "/generate", {"text": "1", "sampling_params": {"max_new_tokens": -1}}),
            ("a temperature that is text", "/generate", {"text": "1", "sampling_params": {"temperature": "hot"}}),
            ("no prompt", "/generate", {"sampling_params": {"max_new_tokens": 1}}),
        ]


class Zerogap(SGLang):
    """Our own engine: the same questions."""


def _answer(reply: Any, ask: Ask) -> Answer:
    found = as_dict(reply, "the answer")
    meta = as_dict(found.get("meta_info"), "meta_info")
    rows = [as_list(row, "output_token_logprobs") for row in as_list(meta.get("output_token_logprobs"), "log-probs")]
    if any(len(row) < 2 for row in rows):
        raise BadAnswerError("output_token_logprobs holds an entry without log-prob and token id")
    carried = as_ids([row[1] for row in rows], "output_token_logprobs") or ()
    ids = as_ids(found.get("output_ids"), "output_ids")
    top: list[dict[Token, float | None]] = []
    for position in as_list(meta.get("output_top_logprobs"), "output_top_logprobs"):
        top.append(tops((row[1], row[0]) for row in as_list(position, "output_top_logprobs")))
    finish = meta.get("finish_reason")
    problems = []
    if meta.get("output_token_logprobs") is None:
        problems.append("no log-probs although they were asked for")
    if ids is not None and carried and ids != carried:
        problems.append(f"output_ids ({len(ids)}) and the tokens that carry log-probs ({len(carried)}) differ")
    return Answer(
        str(found.get("text") or ""),
        ids if ids is not None else carried,
        tuple(number(row[0]) for row in rows),
        tuple(top) if ask.alternatives else (),
        str(finish.get("type", "")) if isinstance(finish, dict) else str(finish or ""),
        as_count(meta.get("completion_tokens")),
        as_count(meta.get("cached_tokens")),
        None,
        tuple(problems),
    )
