"""Refuse objects of one path that would lend code to another: `check_isolation.py NM PATH OBJECT...`.

Objects of a path are compiled with its instruction set. A symbol that they define outside the path's own namespace,
such as an inline function of a shared header, could be the copy that the linker keeps for everyone: a CPU without these
instructions would then die in the generic path. Run by the build before it links.
"""

from __future__ import annotations

import subprocess
import sys

# Of the compiler: references to its own run time, not code.
HARMLESS = ("DW.ref.", "__odr_asan")


def strays(nm: str, path: str, objects: list[str]) -> list[str]:
    """Return the defined global and weak symbols that do not lie in ``zg::<path>``, demangled."""
    inside = f"_ZN2zg{len(path)}{path}", f"_ZNK2zg{len(path)}{path}"
    listed = subprocess.run([nm, "-P", "--defined-only", *objects], check=True, capture_output=True, text=True).stdout
    names = set()
    for line in listed.splitlines():
        words = line.split()
        if len(words) < 2 or len(words[1]) != 1:
            continue  # the name of an object
        name, kind = words[:2]
        if (kind.isupper() or kind in "vwu") and not name.startswith((*inside, *HARMLESS)):
            names.add(name)
    return sorted(names)


def main(nm: str, path: str, *objects: str) -> int:
    """Print what strays; return the exit code."""
    found = strays(nm, path, list(objects))
    for name in found:
        print(f"objects of path {path} define {name}, which is not in zg::{path}: mark it ZG_SHARED (cpp/paths.h)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
