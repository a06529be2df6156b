"""Text that grows token by token, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids; bytes that are not text (yet) become U+FFFD."""


class IncrementalText:
    """Decodes a growing token list, a few tokens at a time.

    A token may end inside a character, so trailing U+FFFD is held back until later tokens decide it. A token's text
    may depend on the one before it (leading spaces), so each window starts with tokens whose text is already out.
    """

    def __init__(self, tokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text went out before
        self._skip = 0  # characters of the window's text that went out
        self._certain = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that became certain."""
        self._window.append(token)
        whole = self._tokenizer.decode(self._window)
        certain = whole.rstrip("\ufffd")
        new = certain[self._skip :]
        if new and certain == whole:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._skip = len(self._tokenizer.decode(self._window))
        else:
            self._skip = max(self._skip, len(certain))
        return new

    def flush(self) -> str:
        """Return the text still held back, undecided bytes as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._skip :] if self._window else ""


class TextTail:
    """Follows a sequence's text, finds its stop strings, and says which text can be shown.

    Args:
        tokenizer: decodes token ids.
        stop_strings: texts that end the sequence.
    """

    def __init__(self, tokenizer: Detokenizer, stop_strings: Sequence[str]) -> None:
        self.text = ""
        self._decoder = IncrementalText(tokenizer)
        self._stops = tuple(stop_strings)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._shown = 0
        self._armed_from = 0

    def push(self, token: int, armed: bool = True) -> bool:
        """Add a token; return whether a stop string is complete, with ``text`` then cut before it.

        Args:
            token: the next token id.
            armed: whether stop strings that this token completes count (not before min_tokens).
        """
        before = len(self.text)
        new = self._decoder.push(token)
        self.text += new
        if not armed:
            self._armed_from = len(self.text)
            return False
        if not new or not self._stops:
            return False
        # Of the stops that are complete the one that begins first cuts; it must end in armed text.
        start = max(0, before - self._longest + 1)
        found = [at for stop in self._stops if (at := self._find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def flush(self) -> None:
        """Add the text still held back at the end; it completes no stop string, since those hold no U+FFFD."""
        self.text += self._decoder.flush()

    def show(self, ended: bool) -> str:
        """Return text not shown before; while the sequence goes on, a possible start of a stop string is held back."""
        end = len(self.text) if ended else len(self.text) - self._possible_stop()
        shown, self._shown = self.text[self._shown : end], max(self._shown, end)
        return shown

    def _find(self, stop: str, start: int) -> int:
        return self.text.find(stop, max(start, self._armed_from - len(stop) + 1))

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
