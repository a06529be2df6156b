"""What the checks share: the engine, the budget, and what earlier checks already found out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerogap.probe import fit, prompts
from zerogap.probe.ask import NEUTRAL, Answer, Ask, Prompt, Token
from zerogap.probe.client import Client
from zerogap.probe.dialects import Dialect, Engine
from zerogap.probe.limits import ProbeError, UnsupportedError


@dataclass
class Probe:
    """One probe of one engine.

    Attributes:
        full: the long form was asked for.
        plain: every question under neutral settings with its answer, for what is looked at in all of them.
        memo: results that later checks use.
    """

    client: Client
    dialect: Dialect
    engine: Engine
    full: bool
    plain: list[tuple[Ask, Answer]] = field(default_factory=list)
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that a comparison generates."""
        return 24 if self.full else 8

    async def ask(self, ask: Ask, *, endpoint: str = "", stream: bool = False) -> Answer:
        """Return the answer to one question that is alone with the engine, as far as the probe goes."""
        return (await self.asks(ask, 1, endpoint=endpoint, stream=stream))[0]

    async def asks(self, ask: Ask, count: int, *, endpoint: str = "", stream: bool = False) -> list[Answer]:
        """Return several answers to one question, in one request where the engine can."""
        if count > 1 and not self.dialect.several:
            return [await self.ask(ask, endpoint=endpoint) for _ in range(count)]
        found = await self.dialect.generate(ask, endpoint=endpoint, count=count, stream=stream)
        if ask.temperature in (0.0, 1.0) and ask.top_p == 1.0 and not ask.top_k and not ask.min_p:
            self.plain += [(ask, answer) for answer in found]
        return found

    async def together(self, asks: Sequence[Ask], *, stagger_s: float = 0.0) -> list[Answer]:
        """Return the answers to questions that are under way at the same time, in their order.

        Raises:
            ProbeError: one of them failed; the first failure, after all have ended.
        """

        async def later(number: int, ask: Ask) -> Answer:
            await asyncio.sleep(number * stagger_s)
            return await self.ask(ask)

        found = await asyncio.gather(*(later(n, ask) for n, ask in enumerate(asks)), return_exceptions=True)
        answers: list[Answer] = []
        for item in found:
            if isinstance(item, BaseException):
                raise item
            answers.append(item)
        return answers

    async def prompt(self, text: str) -> Prompt:
        """Return ``text`` as token ids where the engine takes them, so that no tokenizer stands between."""
        if not self.dialect.has_ids:
            return text
        return await self.ids(text)

    async def ids(self, text: str) -> tuple[int, ...]:
        """Return the token ids of ``text`` by the engine's own tokenizer.

        Raises:
            UnsupportedError: it takes no ids or does not tokenize.
        """
        if not self.dialect.has_ids:
            raise UnsupportedError(f"{self.engine.kind} takes no token ids")
        key = f"ids:{text}"
        if key not in self.memo:
            self.memo[key] = await self.dialect.tokenize(text)
        found: tuple[int, ...] = self.memo[key]
        return found

    async def alternatives(self, prompt: Prompt, **settings: Any) -> dict[Token, float | None]:
        """Return the most likely tokens at the first position under these settings; asked once and remembered.

        Raises:
            UnsupportedError: the engine gives none.
        """
        width = self.dialect.alternatives
        ask = Ask(prompt, 1, alternatives=width, seed=1, **settings)
        key = f"top:{ask}"
        if key not in self.memo:
            top = (await self.ask(ask)).top
            if not top or not top[0]:
                raise UnsupportedError("the engine gives no alternatives beside the chosen token")
            self.memo[key] = fit.best(top[0], width)
        found: dict[Token, float | None] = self.memo[key]
        return found

    async def with_seen(self, text: str, **changes: Any) -> tuple[fit.Top, fit.Top, frozenset[Token]]:
        """Return (plain, changed, seen) alternatives after ``text`` with half of its likely next tokens before it.

        Only a token that is both in the prompt and among the alternatives shows what a repetition penalty does, so
        every other one of the most likely tokens is put in front of the text.
        """
        prompt = await self.prompt(text)
        if not isinstance(prompt, str):
            likely = [token for token in await self.alternatives(prompt, **NEUTRAL) if isinstance(token, int)]
            prompt = (*likely[::2], *prompt)
        plain = await self.alternatives(prompt, **NEUTRAL)
        other = await self.alternatives(prompt, **{**NEUTRAL, **changes})
        return plain, other, frozenset() if isinstance(prompt, str) else frozenset(prompt)

    async def reference(self) -> tuple[Ask, Answer]:
        """Return the greedy question that many checks compare with, and its answer when alone and warm."""
        if "reference" not in self.memo:
            ask = Ask(await self.prompt(prompts.VICTIM), self.tokens, alternatives=self.dialect.alternatives)
            await self.ask(ask)  # the first one fills the prefix cache
            self.memo["reference"] = (ask, await self.ask(ask))
        found: tuple[Ask, Answer] = self.memo["reference"]
        return found


__all__ = ["Probe", "ProbeError"]
