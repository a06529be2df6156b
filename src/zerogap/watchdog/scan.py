"""From bytes of a log to the few lines that a rule knows, at the speed of a compiled literal search.

A search for all literals at once (RE2, a DFA) walks each byte one time; only a line that holds one is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import re2

from zerogap.watchdog.lines import LONGEST, Joiner, Line, parse_line
from zerogap.watchdog.rules import Rule, RuleBook

BEFORE = 4096  # bytes of a very long line kept before a literal
PER_LITERAL = 64  # lines looked at per literal and call: a flood of one message teaches nothing more
PER_CHATTY = 2  # the same for lines that only say that work goes on
CARRY = 1 << 16  # bytes of an unfinished line that are kept whole


@dataclass(frozen=True)
class Hit:
    """A line that a rule matched."""

    rule: Rule
    line: Line
    source: str
    fields: dict[str, str]
    at: float

    def summary(self) -> str:
        """Return the rule's summary with this line's fields filled in."""
        values = dict.fromkeys(self.rule.pattern.groupindex, "?")
        values |= {"line": self.line.text[:300], "speaker": self.line.speaker or "?", **self.fields}
        text = self.rule.summary
        for name, value in values.items():
            text = text.replace("{" + name + "}", value.strip() or "?")
        return text


def prefilter(literals: list[str]) -> re2._Regexp:
    """Compile one search for all ``literals``."""
    pattern = "|".join(re2.escape(literal) for literal in literals)
    return re2.compile(pattern.encode("utf-8"), _options())


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = 64 << 20  # room for the whole DFA, or RE2 would fall back to a slower walk
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors = False
    options.never_capture = True
    return options


class Scanner:
    """Finds the lines of one or more logs that rules know, and counts the rest."""

    def __init__(self, book: RuleBook) -> None:
        self._search = prefilter(sorted(book.by_literal, key=len, reverse=True))
        self._literals = re2.Set.SearchSet(_options())
        order = {id(rule): place for place, rule in enumerate(book.rules)}
        self._by_index: list[tuple[int, ...]] = []
        for literal, rules in book.by_literal.items():
            self._literals.Add(re2.escape(literal).encode("utf-8"))
            self._by_index.append(tuple(order[id(rule)] for rule in rules))
        self._literals.Compile()
        self._rules = book.rules
        # Of a flood of progress lines the first and the last of each look are enough.
        self._chatty = {
            literal.encode()
            for literal, rules in book.by_literal.items()
            if all(rule.kind == "progress" for rule in rules)
        }
        self._carry: dict[str, bytes] = {}
        self._joiner = Joiner()
        self.lines = 0  # all lines seen
        self.known = 0  # lines that a rule matched
        self.skipped = 0  # lines that hold a literal but were not looked at, for their number

    def feed(self, source: str, data: bytes) -> list[bytes]:
        """Return the raw lines of ``data`` that may match a rule, unfinished lines carried over to the next call."""
        data = self._carry.pop(source, b"") + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > CARRY:
            # A line of megabytes is taken in pieces; enough stays behind for a literal on the seam.
            end = len(data) - 512
        self._carry[source] = data[end:]
        self.lines += data.count(b"\n", 0, end)
        return list(self._candidates(data, end))

    def forget(self, source: str) -> bytes:
        """Drop and return the unfinished line of ``source``: the log is read on elsewhere."""
        return self._carry.pop(source, b"")

    def finish(self, source: str) -> list[bytes]:
        """Return the candidates of a last line without a newline."""
        rest = self._carry.pop(source, b"")
        self.lines += bool(rest)
        return list(self._candidates(rest, len(rest)))

    def _candidates(self, data: bytes, end: int) -> Iterator[bytes]:
        position, seen = 0, dict[bytes, int]()
        while position < end:
            found = self._search.search(data, position, end)
            if found is None:
                return
            start, literal = found.start(), found.group()
            stop = data.find(b"\n", start, end)
            stop = end if stop < 0 else stop
            seen[literal] = seen.get(literal, 0) + 1
            if seen[literal] <= (PER_CHATTY if literal in self._chatty else PER_LITERAL):
                first = max(data.rfind(b"\n", 0, start) + 1, start - BEFORE)
                yield data[first : min(stop, start + LONGEST)]
            else:
                self.skipped += 1
            position = stop + 1

    def match(self, source: str, raw: bytes, at: float) -> list[Hit]:
        """Return the hits of one candidate line (none while it is the first half of a two-line message)."""
        return self._hits(source, self._joiner.push(source, parse_line(raw)), at)

    def flush(self, source: str, at: float) -> list[Hit]:
        """Return the hits of a half message that nothing followed."""
        return self._hits(source, self._joiner.flush(source), at)

    def _hits(self, source: str, lines: list[Line], at: float) -> list[Hit]:
        hits: list[Hit] = []
        for line in lines:
            before = len(hits)
            for rule in self.matching(line):
                found = rule.pattern.search(line.text)
                assert found is not None
                fields = {name: value for name, value in found.groupdict().items() if value is not None}
                hits.append(Hit(rule, line, source, fields, at))
            self.known += len(hits) > before
        return hits

    def matching(self, line: Line) -> list[Rule]:
        """Return the rules that match ``line``: all that are not causes, and the causes of the lowest rank."""
        # A prefix that was taken off may have held the start of a literal such as " exit=".
        padded = b" " + line.text.encode("utf-8", "replace") + b"\n"
        places = sorted({place for index in self._literals.Match(padded) or () for place in self._by_index[index]})
        found = [self._rules[place] for place in places if self._rules[place].pattern.search(line.text)]
        causes = [rule for rule in found if rule.kind == "cause"]
        best = min((rule.rank for rule in causes), default=0)
        first = next((rule for rule in causes if rule.rank == best), None)
        return [rule for rule in found if rule.kind != "cause" or rule is first]


def number(text: str | None) -> float:
    """Return the number in a captured text, 0 for anything else."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def moment(hit: Hit) -> float:
    """Return the time that the line itself carries, else when it was read."""
    return hit.line.stamp if hit.line.stamp is not None else hit.at
