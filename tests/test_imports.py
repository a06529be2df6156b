"""Arrows go one way: no module of the package imports, however indirectly and however late, itself."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def imported(path: Path, names: set[str]) -> set[str]:
    """Modules of ours that a file imports anywhere: at its head, in a function, or for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import name` is the package itself only where a name is none of its modules.
            found |= whole & names or {node.module}
            found |= {node.module} if whole - names else set()
    return found & names


def arrows() -> dict[str, set[str]]:
    files = {}
    for path in (SOURCE / "zerogap").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    # The root's own names are offered lazily from the packages under it.
    root = files.pop("zerogap")
    assert root.name == "__init__.py"
    return {name: imported(path, set(files)) for name, path in files.items()}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module, and modules that import themselves."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += graph[name]
        reached[start] = seen
    groups = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def test_a_circle_would_be_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_module_imports_itself_through_others() -> None:
    assert circles(arrows()) == []


def test_nothing_imports_from_the_command_line() -> None:
    graph = arrows()
    users = {name for name, targets in graph.items() if any(t.startswith("zerogap.cli") for t in targets)}
    assert {name for name in users if not name.startswith("zerogap.cli")} == {"zerogap.__main__"}
