"""Reads the words of a shell script: quotes, expansions, arrays; what only a run would tell is hidden."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from zerogap.errors import UsageError

HIDDEN = "\0"  # stands for a piece of text that is hidden; scripts with NUL bytes are refused, so it is unambiguous

SCRIPT_LIMIT = 4 * 2**20
LINE_LIMIT = 2**20
DEPTH_LIMIT = 40

SPACE = re.compile(r"(?:[ \t\r]|\\\n)+")
NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"[^\s'\"\\$`;&|()<>]+")
_QUOTED_PLAIN = re.compile(r"[^\"\\$`]+")
_SCRIPT_DIR = re.compile(
    r"\bcd\b.*dirname.*(BASH_SOURCE|\$\{?0).*\bpwd\b|realpath.*dirname.*(BASH_SOURCE|\$\{?0)", re.DOTALL
)


@dataclass(frozen=True)
class Word:
    """One word of a command.

    Attributes:
        text: the text; each ``HIDDEN`` in it stands for an unknown piece.
        line: line number in the script, from 1.
        hidden: what hides the unknown pieces, as written in the script.
        many: an unquoted or array expansion of unknown length, which may hold any words.
    """

    text: str
    line: int
    hidden: tuple[str, ...] = ()
    many: bool = False


@dataclass(frozen=True)
class Piece:
    """A value: text and what hides parts of it."""

    text: str
    hidden: tuple[str, ...] = ()


@dataclass
class _Field:
    """A word in the making; its parts are joined once, since words may be long."""

    parts: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    many: bool = False
    line: int = 0

    def add(self, text: str) -> None:
        self.parts.append(text)

    def word(self, line: int) -> Word:
        return Word("".join(self.parts), self.line or line, tuple(dict.fromkeys(self.hidden)), self.many)


Variables = dict[str, Piece | list[Word]]


@dataclass
class Budget:
    """What one reading may take in altogether, over every file that a script names.

    Attributes:
        words: words of commands and arrays that are left.
        files: other files that may still be read.
    """

    words: int = 50_000
    files: int = 24

    def spend(self, words: int, name: str, line: int) -> None:
        """Take words off, or raise ``UsageError``: no launch script is that long."""
        self.words -= words
        if self.words < 0:
            raise UsageError(f"{name} line {line}: more words than a launch script has; nothing was read")

    def may_read(self, path: Path) -> bool:
        """Whether another file may be read; it counts as read then."""
        if self.files <= 0 or not path.is_file() or path.stat().st_size > SCRIPT_LIMIT:
            return False
        self.files -= 1
        return True


class WordReader:
    """Reads words at a moving position, with the variables known so far.

    Args:
        text: the script.
        name: what to call it in errors.
        folder: the folder it lies in, or None.
        variables: scalars and arrays known so far.
        depth: how deep this reader stands inside others.
    """

    def __init__(
        self, text: str, name: str, folder: Path | None, variables: Variables, depth: int, first_line: int = 1
    ) -> None:
        self.text, self.name, self.folder, self.variables = text, name, folder, variables
        self.depth, self.pos = depth, 0
        self.first_line, self._line, self._line_pos = first_line, first_line, 0

    def line(self) -> int:
        """Return the number of the line at the position."""
        if self.pos < self._line_pos:
            self._line, self._line_pos = self.first_line, 0
        self._line += self.text.count("\n", self._line_pos, self.pos)
        self._line_pos = self.pos
        return self._line

    def unclosed(self, what: str, line: int) -> UsageError:
        """Return the error for something that a line opens and nothing closes."""
        return UsageError(f"{self.name} line {line}: {what} opened here is never closed; nothing was read")

    # -- words

    def _word(self, line: int) -> list[Word]:
        """Read one word; arrays and unquoted variables may give several, or none."""
        fields = [_Field()]
        started = False
        begin = self.pos
        while self.pos < len(self.text):
            if found := _PLAIN.match(self.text, self.pos):
                fields[-1].add(found[0])
                self.pos = found.end()
                started = True
                continue
            character = self.text[self.pos]
            if character == "\\":
                escaped = self.text[self.pos + 1 : self.pos + 2]
                self.pos += 2
                if escaped != "\n":
                    fields[-1].add(escaped)
                    started = True
            elif character == "'":
                fields[-1].add(self._single(line))
                started = True
            elif character == '"':
                started = self._double(fields, line) or started
            elif character in "$`":
                value = self._dollar(line, quoted=False)
                if isinstance(value, list):
                    _splice(fields, value)
                    started = started or bool(value)
                else:
                    started = _split(fields, value) or started
            else:
                break
        if self.pos == begin:
            self.pos += 1
            return []
        if not started:
            return []
        return [part.word(line) for part in fields]

    def _value_word(self, line: int) -> Piece:
        """Read the value of an assignment, which is not split into words."""
        words = self._word(line)
        return Piece(" ".join(word.text for word in words), tuple(name for word in words for name in word.hidden))

    def _single(self, line: int) -> str:
        end = self.text.find("'", self.pos + 1)
        if end < 0:
            raise self.unclosed("a single quote", line)
        value = self.text[self.pos + 1 : end]
        self.pos = end + 1
        return value

    def _double(self, fields: list[_Field], line: int) -> bool:
        """Read a double-quoted part; ``"${EMPTY[@]}"`` alone is no word at all, so the return says if there is one."""
        self.pos += 1
        arrays, seen, other = False, False, False
        while self.pos < len(self.text):
            if found := _QUOTED_PLAIN.match(self.text, self.pos):
                _add(fields, Piece(found[0]))
                self.pos = found.end()
                other = True
                continue
            character = self.text[self.pos]
            if character == '"':
                self.pos += 1
                return seen or other or not arrays
            if character == "\\":
                escaped = self.text[self.pos + 1 : self.pos + 2]
                self.pos += 2
                if escaped != "\n":
                    _add(fields, Piece(escaped if escaped in '$`"\\' else "\\" + escaped))
                other = True
                continue
            value = self._dollar(line, quoted=True)
            if isinstance(value, list):
                _splice(fields, value)
                arrays, seen = True, seen or bool(value)
            else:
                _add(fields, value)
                other = True
        raise self.unclosed("a double quote", line)

    # -- expansions

    def _dollar(self, line: int, *, quoted: bool) -> Piece | list[Word]:
        if self.text[self.pos] == "`":
            end = self.pos + 1
            while end < len(self.text) and self.text[end] != "`":
                end += 2 if self.text[end] == "\\" else 1
            if end >= len(self.text):
                raise self.unclosed("a back quote", line)
            self.pos = end + 1
            return Piece(HIDDEN, ("`…`",))
        following = self.text[self.pos + 1 : self.pos + 2]
        if following == "(":
            begin = self.pos
            self._skip_parens(line)
            inside = self.text[begin : self.pos]
            if self.folder is not None and _SCRIPT_DIR.search(inside[:1000]):
                return Piece(str(self.folder))
            return Piece(HIDDEN, (_short(inside),))
        if following == "{":
            return self._braces(line)
        if following == "'" and not quoted:
            self.pos += 1
            return Piece(self._single(line))
        if found := NAME.match(self.text, self.pos + 1):
            self.pos = found.end()
            return self._value(found[0], f"${found[0]}")
        if following and following in "@*":
            self.pos += 2
            value = self.variables.get("@")
            return value if isinstance(value, list) else []  # no arguments are given to the script
        if following and following in "0123456789#?$!-":
            self.pos += 2
            return Piece(HIDDEN, (f"${following}",))
        self.pos += 1
        return Piece("$")

    def _value(self, name: str, written: str) -> Piece:
        value = self.variables.get(name)
        if isinstance(value, Piece):
            return value
        if isinstance(value, list):
            return Piece(value[0].text, value[0].hidden) if value else Piece("")
        return Piece(HIDDEN, (written,))

    def _braces(self, line: int) -> Piece | list[Word]:
        begin = self.pos + 2
        depth, end = 1, begin
        while depth and end < len(self.text):
            character = self.text[end]
            if character == "\\":
                end += 1
            elif character == "'" and depth == 1 and '"' not in self.text[begin:end]:
                close = self.text.find("'", end + 1)
                end = close if close > 0 else end
            elif self.text.startswith("${", end):
                depth, end = depth + 1, end + 1
            elif character == "}":
                depth -= 1
            end += 1
            if depth > DEPTH_LIMIT * 1000:
                raise UsageError(f"{self.name} line {line}: expansions nested more than {DEPTH_LIMIT * 1000} deep")
        if depth:
            raise self.unclosed("${", line)
        inside = self.text[begin : end - 1]
        self.pos = end
        return self._expand(inside, line)

    def _expand(self, inside: str, line: int) -> Piece | list[Word]:
        written = _short("${" + inside + "}")
        found = NAME.match(inside)
        if not found:
            if inside[:1] in ("@", "*"):
                value = self.variables.get("@")
                return value if isinstance(value, list) else []
            return Piece(HIDDEN, (written,))
        name, rest = found[0], inside[found.end() :]
        if rest[:3] in ("[@]", "[*]"):
            value = self.variables.get(name)
            tail = rest[3:]
            if (tail and tail[0] not in "+:-") or tail.startswith((":0", ":1")):
                return [Word(HIDDEN, line, (written,), many=True)]
            if isinstance(value, list):
                return value
            if isinstance(value, Piece):
                return [Word(value.text, line, value.hidden, many=HIDDEN in value.text)]
            return [Word(HIDDEN, line, (written,), many=True)]
        if not rest:
            return self._value(name, written)
        operator = re.match(r":?([-=?+])", rest)
        if not operator:
            return Piece(HIDDEN, (written,))
        value = self.variables.get(name)
        current = self._value(name, written)
        if value is None or HIDDEN in current.text:
            return Piece(HIDDEN, (written,))
        empty = not current.text
        wants_other = not empty if operator[1] == "+" else empty
        if not wants_other:
            return Piece("") if operator[1] == "+" else current
        if self.depth >= DEPTH_LIMIT:
            return Piece(HIDDEN, (written,))
        other = WordReader(
            '"' + rest[operator.end() :].strip('"') + '"',
            self.name,
            self.folder,
            self.variables,
            self.depth + 1,
            line,
        )
        return other._value_word(line)

    # -- skipping

    def _skip_parens(self, line: int) -> None:
        """Step over ``$( … )`` or ``( … )`` with the quotes and brackets inside it."""
        depth, place, double = 0, self.text.index("(", self.pos), False
        token = re.compile(r"[()\"'\\]")
        while found := token.search(self.text, place):
            character, place = found[0], found.end()
            if character == "\\":
                place += 1
            elif character == '"':
                double = not double
            elif character == "'" and not double:
                place = self.text.find("'", place) + 1
                if place == 0:
                    break
            elif character == "(":
                depth += 1
            elif character == ")":
                depth -= 1
                if depth == 0:
                    self.pos = place
                    return
        raise self.unclosed("$(", line)


def _short(text: str) -> str:
    flat = re.sub(r"\s+", " ", text)
    return flat if len(flat) <= 60 else flat[:57] + "…"


def _add(fields: list[_Field], piece: Piece) -> None:
    fields[-1].add(piece.text)
    fields[-1].hidden.extend(piece.hidden)


def _split(fields: list[_Field], piece: Piece) -> bool:
    """Add an unquoted value: white space in it ends words, and a hidden one may be any number of them."""
    if HIDDEN in piece.text:
        _add(fields, piece)
        fields[-1].many = True
        return True
    for index, part in enumerate(piece.text.split()):
        if index or (piece.text[0].isspace() and any(fields[-1].parts)):
            fields.append(_Field())
        _add(fields, Piece(part))
    return bool(piece.text.strip())


def _splice(fields: list[_Field], words: list[Word]) -> None:
    for index, word in enumerate(words):
        if index:
            fields.append(_Field())
        _add(fields, Piece(word.text, word.hidden))
        fields[-1].many = fields[-1].many or word.many
        fields[-1].line = word.line
