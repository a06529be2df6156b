"""Who waits for whom: a circle in the graph, or a wait for someone who is gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def circle(edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return a closed way ``(a, b, …, a)`` through ``edges``, its alphabetically first member first, or ``()``."""
    graph: dict[str, list[str]] = {}
    for who, whom in edges:
        graph.setdefault(who, [])
        if whom not in graph[who]:
            graph[who].append(whom)
    done: set[str] = set()
    for start in graph:
        found = _walk(graph, start, [], done)
        if found:
            ring = found[:-1]
            first = ring.index(min(ring))
            ring = ring[first:] + ring[:first]
            return (*ring, ring[0])
    return ()


def _walk(graph: dict[str, list[str]], node: str, way: list[str], done: set[str]) -> list[str]:
    if node in way:
        return [*way[way.index(node) :], node]
    if node in done:
        return []
    for following in graph.get(node, ()):
        found = _walk(graph, following, [*way, node], done)
        if found:
            return found
    done.add(node)
    return []


def group_edges(joined: str, missing: str) -> list[tuple[str, str]]:
    """Return the waits of a communication group: each member that joined waits for each that is missing."""
    return [(who, whom) for who in _names(joined) for whom in _names(missing) if who != whom]


def _names(text: str) -> Sequence[str]:
    return [name.strip(" '\"") for name in text.split(",") if name.strip(" '\"")]
