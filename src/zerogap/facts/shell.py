"""Reads a shell script without running it: words, assignments, arrays. What only a run would tell is *hidden*.

A small part of the shell language is understood: quoting, comments, continuation, assignments, arrays, ``${NAME}``,
``source`` of a readable file, here-documents (skipped). Everything else (``$(…)``, arithmetic, pattern expansion, loop
variables, what stands inside ``if``) gives a hidden piece, never a guess. No text of a script reaches a shell.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.errors import UsageError
from zerogap.facts.shellwords import (
    HIDDEN,
    LINE_LIMIT,
    NAME,
    SCRIPT_LIMIT,
    SPACE,
    Budget,
    Piece,
    Variables,
    Word,
    WordReader,
)

_VALUE_LIMIT = 256 * 1024

_NESTING = 8

_BLANK = re.compile(r"(?:\s|\\\n)+")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[[^\]\n]*\])?(\+?)=")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(['\"]?)([^\s'\";&|<>()]+)\2")
_REDIRECT = re.compile(r"<<<|<>|>>|>\||[<>]&?")
_OPENERS = frozenset(("if", "for", "while", "until", "case", "select"))
_PREFIXES = _OPENERS | {"!", "{", "}", "then", "do", "else", "elif", "time", "function"}
_CLOSERS = frozenset(("fi", "done", "esac"))
_HARMLESS_SOURCE = re.compile(r"(activate|\.bashrc|\.profile|\.bash_profile|conda\.sh)$")
_DECLARATIONS = frozenset(("export", "declare", "local", "readonly", "typeset"))


@dataclass(frozen=True)
class Command:
    """One simple command with the variables set before it, as ``A=1 python train.py``."""

    words: tuple[Word, ...]
    env: dict[str, Word]
    line: int
    conditional: bool


@dataclass
class Script:
    """What a script does as far as reading tells.

    Attributes:
        commands: the simple commands in order.
        exported: variables given to the environment (``export A=1``).
    """

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, Word] = field(default_factory=dict)


def read_script(
    text: str, name: str, folder: Path | None = None, arguments: Sequence[Word] = (), budget: Budget | None = None
) -> Script:
    """Read a script.

    Args:
        text: the script.
        name: what to call it in errors.
        folder: the folder it lies in, for ``source`` and the usual SCRIPT_DIR line; None when it lies nowhere.
        arguments: what the script is called with.
        budget: what may still be read; a new one by default.

    Raises:
        UsageError: NUL bytes, an unclosed quote or bracket, or a size beyond the limits.
    """
    reader = _Reader(text, name, folder, {"@": list(arguments)}, Script(), 0, budget or Budget())
    reader.run()
    return reader.script


class _Reader(WordReader):
    """Reads statements on top of words."""

    def __init__(
        self,
        text: str,
        name: str,
        folder: Path | None,
        variables: Variables,
        script: Script,
        depth: int,
        budget: Budget,
    ) -> None:
        _refuse(text, name)
        super().__init__(text, name, folder, variables, depth)
        self.script, self.budget, self.branch, self.chained = script, budget, 0, False
        self.heredocs: list[tuple[str, bool]] = []

    # -- statements

    def run(self) -> None:
        words: list[Word] = []
        env: dict[str, Word] = {}
        start = 1
        while self.pos < len(self.text):
            if found := SPACE.match(self.text, self.pos):
                self.pos = found.end()
                continue
            character = self.text[self.pos]
            if character == "#":
                end = self.text.find("\n", self.pos)
                self.pos = len(self.text) if end < 0 else end
            elif character in ";&|()\n":
                self._operator(character, words, env, start)
                words, env = [], {}
            elif character in "<>":
                if words and words[-1].text.isdigit() and self.text[self.pos - 1].isdigit():
                    words.pop()
                self._redirect()
            else:
                if not words and not env:
                    start = self.line()
                self._one_word(words, env)
        self._finish(words, env, start)

    def _operator(self, character: str, words: list[Word], env: dict[str, Word], start: int) -> None:
        double = self.text.startswith(character * 2, self.pos) and character in "&|;"
        self._finish(words, env, start)
        self.pos += 2 if double else 1
        self.chained = double and character in "&|"
        if character == "&" and self.text.startswith(">", self.pos):
            self._redirect()
        if character == "\n":
            self._skip_heredocs()

    def _one_word(self, words: list[Word], env: dict[str, Word]) -> None:
        line = self.line()
        begins = len(words) < 4 and all(word.text in _PREFIXES for word in words)
        if begins and (found := _ASSIGN.match(self.text, self.pos)):
            name, index, append = found[1], found[2], bool(found[3])
            self.pos = found.end()
            if self.text.startswith("(", self.pos):
                self._assign_array(name, append, line)
                return
            self.budget.spend(1, self.name, line)
            piece = self._value_word(line)
            env[name if not index else f"{name}["] = Word(piece.text, line, piece.hidden)
            if append:
                before = self.variables.get(name)
                if isinstance(before, Piece):
                    env[name] = Word(before.text + piece.text, line, before.hidden + piece.hidden)
                else:
                    env[name] = Word(HIDDEN, line, (f"{name}+=",))
            return
        if words and words[0].text in _DECLARATIONS and (found := _ASSIGN.match(self.text, self.pos)):
            self.pos = found.end()
            if self.text.startswith("(", self.pos):
                self._assign_array(found[1], bool(found[3]), line)
                return
            piece = self._value_word(line)
            self._assign(found[1], piece, line)
            if words[0].text == "export":
                self.script.exported[found[1]] = self._as_word(found[1], line)
            return
        fields = self._word(line)
        self.budget.spend(len(fields) or 1, self.name, line)
        words.extend(fields)

    def _finish(self, words: list[Word], env: dict[str, Word], line: int) -> None:
        """Take in one simple command."""
        chained, self.chained = self.chained, False
        lead = 0
        while lead < len(words) and words[lead].text in _PREFIXES:
            head, lead = words[lead].text, lead + 1
            if head in _OPENERS:
                self.branch += 1
                if head in ("for", "select", "case") and lead < len(words):
                    self.variables[words[lead].text] = Piece(HIDDEN, (f"loop variable {words[lead].text}",))
                    lead = len(words)
            elif head == "function":
                return
        words = words[lead:]
        if not words:
            for name, word in env.items():
                piece = Piece(word.text, word.hidden)
                self._assign(name.rstrip("["), piece, word.line, chained or name.endswith("["))
            return
        head = words[0].text
        if head in _CLOSERS:
            self.branch = max(0, self.branch - 1)
            return
        if head in ("read", "mapfile", "readarray", "unset", "getopts", "printf"):
            for word in words[1:]:
                if NAME.fullmatch(word.text) and (head != "printf" or word.text in self.variables):
                    self.variables[word.text] = Piece(
                        "" if head == "unset" else HIDDEN, () if head == "unset" else (head,)
                    )
        elif head == "export":
            for word in words[1:]:
                if NAME.fullmatch(word.text):
                    self.script.exported[word.text] = self._as_word(word.text, word.line)
        elif head in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif head == "eval":
            self._hide_all(f"eval (line {line})")
        elif head == "set" and len(words) > 1 and words[1].text == "--":
            self.variables["@"] = list(words[2:])
        self.script.commands.append(Command(tuple(words), dict(env), line, self.branch > 0))

    # -- variables

    def _assign(self, name: str, piece: Piece, line: int, doubtful: bool = False) -> None:
        before = self.variables.get(name)
        if (self.branch or doubtful) and before != piece:
            piece = Piece(HIDDEN, (f"${name}, set under a condition in line {line}",))
        if len(piece.text) > _VALUE_LIMIT:
            piece = Piece(HIDDEN, (f"${name}, longer than {_VALUE_LIMIT} characters",))
        self.variables[name] = piece
        if name in self.script.exported:
            self.script.exported[name] = Word(piece.text, line, piece.hidden)

    def _assign_array(self, name: str, append: bool, line: int) -> None:
        self.pos += 1
        self.budget.spend(1, self.name, line)
        words: list[Word] = []
        while True:
            if found := _BLANK.match(self.text, self.pos):
                self.pos = found.end()
            if self.pos >= len(self.text):
                raise self.unclosed(f"the array {name}=(", line)
            character = self.text[self.pos]
            if character == ")":
                self.pos += 1
                break
            if character == "#":
                end = self.text.find("\n", self.pos)
                self.pos = len(self.text) if end < 0 else end
            elif character in ";&|<>(":
                self.pos += 1  # no array element; what a shell refuses cannot start a run
                words.append(Word(HIDDEN, line, (f"the array {name}",), many=True))
            else:
                before_count = len(words)
                words.extend(self._word(self.line()))
                self.budget.spend(len(words) - before_count or 1, self.name, line)
        before = self.variables.get(name)
        if append and isinstance(before, list):
            words = [*before, *words]
        elif append and isinstance(before, Piece):
            words = [Word(before.text, line, before.hidden, many=bool(before.hidden)), *words]
        if self.branch or self.chained:
            kept = before if isinstance(before, list) else []
            if words != kept:
                hidden = Word(HIDDEN, line, (f"the array {name}, changed under a condition in line {line}",), many=True)
                words = [*kept, hidden] if append or kept else [hidden]
        self.variables[name] = words

    def _as_word(self, name: str, line: int) -> Word:
        value = self.variables.get(name)
        if isinstance(value, Piece):
            return Word(value.text, line, value.hidden)
        return Word(HIDDEN, line, (f"${name}",))

    def _hide_all(self, why: str) -> None:
        for name, value in self.variables.items():
            if isinstance(value, list):
                self.variables[name] = [Word(HIDDEN, 0, (f"{why} may change {name}",), many=True)]
            else:
                self.variables[name] = Piece(HIDDEN, (f"{why} may change {name}",))

    def _source(self, word: Word) -> None:
        if _HARMLESS_SOURCE.search(word.text):
            return
        path = None if HIDDEN in word.text or self.folder is None else self.folder / word.text
        with contextlib.suppress(OSError):
            if path is not None and self.depth < _NESTING and self.budget.may_read(path):
                text = path.read_text(encoding="utf-8", errors="replace")
                inner = _Reader(text, path.name, path.parent, self.variables, self.script, self.depth + 1, self.budget)
                inner.branch = self.branch
                inner.run()
                return
        self._hide_all(f"source in line {word.line}, which was not read,")

    def _redirect(self) -> None:
        line = self.line()
        if here := _HEREDOC.match(self.text, self.pos):
            self.heredocs.append((here[3], bool(here[1])))
            self.pos = here.end()
            return
        found = _REDIRECT.match(self.text, self.pos)
        assert found is not None
        self.pos = found.end()
        if self.text.startswith("(", self.pos):
            self._skip_parens(line)
            return
        if space := SPACE.match(self.text, self.pos):
            self.pos = space.end()
        if self.pos < len(self.text) and self.text[self.pos] not in "\n;&|<>()":
            self._word(line)

    def _skip_heredocs(self) -> None:
        while self.heredocs:
            ending, tabs = self.heredocs.pop(0)
            tab = r"\t*" if tabs else ""
            found = re.compile(rf"^{tab}{re.escape(ending)}[ \t]*$", re.MULTILINE).search(self.text, self.pos)
            self.pos = len(self.text) if found is None else min(found.end() + 1, len(self.text))


def _refuse(text: str, name: str) -> None:
    if HIDDEN in text:
        raise UsageError(f"{name} holds NUL bytes; it is no script or log")
    if len(text) > SCRIPT_LIMIT:
        raise UsageError(f"{name} is longer than {SCRIPT_LIMIT // 2**20} MiB; it is no launch script")
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        if end - start > LINE_LIMIT:
            line = text.count("\n", 0, start) + 1
            raise UsageError(f"{name} line {line} has {end - start} characters; lines up to {LINE_LIMIT} are read")
        start = end + 1
