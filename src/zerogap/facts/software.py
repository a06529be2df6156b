"""Installed software, read from package metadata and files without importing (or running) any of it."""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from zerogap import __version__
from zerogap.errors import UsageError
from zerogap.facts import elf
from zerogap.facts.fact import ABSENT, Fact, Facts

_METADATA_LIMIT = 2**20


@dataclass(frozen=True)
class Distribution:
    """One installed distribution.

    Attributes:
        name: normalised name.
        folder: the ``.dist-info`` or ``.egg-info`` folder.
        root: where its packages lie: site-packages, or the source tree of an editable install.
        requires: its requirements as written.
    """

    name: str
    version: str
    folder: Path
    root: Path
    requires: tuple[str, ...]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("zerogap.facts") / "software.toml").read_text(encoding="utf-8"))


def site_folders(python: Path | None) -> tuple[list[Path], str]:
    """Return the import folders of a Python and its version.

    Args:
        python: the interpreter of another environment (it is looked at, not run), or None for this one.

    Raises:
        UsageError: no such interpreter, or no site-packages beside it.
    """
    if python is None:
        return [Path(entry) for entry in dict.fromkeys(sys.path) if entry and Path(entry).is_dir()], (
            f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}"
        )
    where = python.expanduser()
    if not where.exists():
        raise UsageError(f"--python {python}: no such file; name the interpreter, such as venv/bin/python")
    home = where if where.is_dir() else where.parent.parent
    # Debian's own Python keeps what pip installs under /usr/local.
    homes = [home, Path("/usr/local")] if home == Path("/usr") else [home]
    named = re.search(r"python(3\.\d+)$", where.resolve().name) if home in (Path("/usr"), Path("/usr/local")) else None
    wanted = f"python{named[1]}" if named else "python3*"
    patterns = (f"lib*/{wanted}/site-packages", f"lib/{wanted}/dist-packages", "lib/python3/dist-packages")
    folders = [
        folder for base in homes for pattern in patterns for folder in sorted(base.glob(pattern)) if folder.is_dir()
    ]
    folders = list(dict.fromkeys(folders))
    if not folders:
        raise UsageError(
            f"--python {python}: no lib/python3*/site-packages beside it; name a virtual environment's python"
        )
    version = _config_version(home) or (
        named[1] if named else re.sub(r".*python(3[.\d]*)$", r"\1", str(folders[0].parent))
    )
    if _config_value(home, "include-system-site-packages") == "true" and (base := _config_value(home, "home")):
        parent = Path(base).parent
        folders += sorted(parent.glob(f"lib/{folders[0].parent.name}/*-packages"))
    return folders, version


def _config_value(home: Path, key: str) -> str | None:
    try:
        text = (home / "pyvenv.cfg").read_text(errors="replace")[:_METADATA_LIMIT]
    except OSError:
        return None
    found = re.search(rf"^{re.escape(key)}\s*=\s*(.+?)\s*$", text, re.MULTILINE)
    return found[1] if found else None


def _config_version(home: Path) -> str | None:
    found = re.match(r"3\.\d+(\.\d+)?", _config_value(home, "version") or _config_value(home, "version_info") or "")
    return found[0] if found else None


def distributions(folders: list[Path]) -> dict[str, list[Distribution]]:
    """Return the distributions that matter, by normalised name, in import order (two of one name are two entries)."""
    wanted = {name for names in _tables()["distributions"].values() for name in names}
    found: dict[str, list[Distribution]] = {}
    for folder in folders:
        try:
            entries = sorted(entry.name for entry in os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            stem, ending = os.path.splitext(entry)
            if ending not in (".dist-info", ".egg-info", ".egg"):
                continue
            if _normal(stem.partition("-")[0]) in wanted and (dist := _read(folder, entry)):
                found.setdefault(dist.name, []).append(dist)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(site: Path, entry: str) -> Distribution | None:
    folder = site / entry
    inside = folder / "EGG-INFO" if entry.endswith(".egg") else folder
    text = ""
    for candidate in (inside / "METADATA", inside / "PKG-INFO", folder):
        try:
            with open(candidate, encoding="utf-8", errors="replace") as stream:
                text = stream.read(_METADATA_LIMIT)
            break
        except OSError:
            continue
    headers = HeaderParser().parsestr(text)
    name, version = headers.get("Name"), headers.get("Version")
    if not name or not version:
        stem = os.path.splitext(entry)[0].split("-")
        if len(stem) < 2:
            return None
        name, version = stem[0], stem[1]
    root = folder if entry.endswith(".egg") else _editable_root(inside) or site
    return Distribution(_normal(name), version.strip(), folder, root, tuple(headers.get_all("Requires-Dist") or ()))


def _editable_root(info: Path) -> Path | None:
    try:
        record = json.loads((info / "direct_url.json").read_text()[:_METADATA_LIMIT])
        if not record["dir_info"]["editable"]:
            return None
        return Path(unquote(urlparse(record["url"]).path))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def software_facts(python: Path | None = None) -> Facts:
    """Return what is installed in an environment; nothing of it is imported or run."""
    folders, version = site_folders(python)
    found = distributions(folders)
    place = str(python) if python else sys.executable
    known: dict[str, Fact] = {"software.python": Fact(version, place)}
    for fact, names in _tables()["distributions"].items():
        dist = next((item for name in names for item in found.get(_normal(name), ()) if _belongs(fact, item)), None)
        known[f"software.{fact}"] = (
            Fact(dist.version, str(dist.folder))
            if dist
            else Fact(ABSENT, f"no {' or '.join(names)} in {folders[-1] if python else place}")
        )
    if python is None:
        known["software.zerogap"] = Fact(__version__, "this program")
    known.update(_flash_attention(found))
    known.update(_torch(known["software.torch"], found, folders))
    known.update(_triton(found))
    known.update(_sgl_kernel(known["software.sgl_kernel"], found))
    known.update(_folders(known, found, folders))
    known.update(_libraries(folders))
    return Facts(known)


def _belongs(fact: str, dist: Distribution) -> bool:
    """flash-attn is FlashAttention 2 up to version 2, and an old FlashAttention 3 build from 3 on."""
    if dist.name != "flash-attn":
        return True
    return dist.version.startswith({"flash_attn_2": "2.", "flash_attn_3": "3.", "flash_attn_4": "4."}.get(fact, "?"))


def _flash_attention(found: dict[str, list[Distribution]]) -> dict[str, Fact]:
    names = ("flash-attn", "flash-attn-3", "flash-attn-4", "flash-attn-cute")
    copies = [dist for name in names for dist in found.get(name, ())]
    shown = tuple(f"{dist.folder} ({dist.name} {dist.version})" for dist in copies)
    return {"software.flash_attn_paths": Fact(shown, "package metadata")}


def _torch(torch: Fact, found: dict[str, list[Distribution]], folders: list[Path]) -> dict[str, Fact]:
    if torch.value == ABSENT:
        return {"software.torch_cuda": Fact(ABSENT, torch.source), "software.torch_archs": Fact((), torch.source)}
    version, cuda, source = str(torch.value), None, torch.source
    for dist in found.get("torch", ()):
        try:
            file = dist.root / "torch" / "version.py"
            text = file.read_text(errors="replace")[:65536]
        except OSError:
            continue
        if stated := re.search(r"^cuda(?::[^=]+)? *= *(?:'([\d.]+)'|(None))", text, re.MULTILINE):
            cuda, source = stated[1] or ABSENT, str(file)
            break
    if cuda is None and (local := re.search(r"\+cu(\d{2})(\d)", version)):
        cuda = f"{local[1]}.{local[2]}"
    elif cuda is None and re.search(r"\+(cpu|rocm)", version):
        cuda = ABSENT
    known: dict[str, Fact] = {}
    if cuda:
        known["software.torch_cuda"] = Fact(cuda, source)
    for row in _tables()["torch_builds"]:
        if version.startswith(row["torch"] + ".") and cuda == row["cuda"]:
            known["software.torch_archs"] = Fact(
                tuple(row["archs"]), f"table of PyTorch builds ({_tables()['torch_builds_source']})"
            )
    return known


def _triton(found: dict[str, list[Distribution]]) -> dict[str, Fact]:
    archs: set[str] = set()
    read: list[str] = []
    for dist in found.get("triton", ()):
        for tool in sorted((dist.root / "triton/backends/nvidia/bin").glob("ptxas*")):
            if not tool.name.endswith((".txt", ".md")):
                archs |= set(elf.arch_names(tool))
                read.append(str(tool))
        break
    return {"software.triton_archs": Fact(tuple(sorted(archs, key=_arch_key)), " and ".join(read))} if archs else {}


def _arch_key(arch: str) -> tuple[int, str]:
    return int(re.sub(r"\D", "", arch) or 0), arch


def _sgl_kernel(kernel: Fact, found: dict[str, list[Distribution]]) -> dict[str, Fact]:
    known: dict[str, Fact] = {}
    for dist in [*found.get("sglang-kernel", ()), *found.get("sgl-kernel", ())][:1]:
        package = dist.root / "sgl_kernel"
        parts = sorted(package.glob("flash_ops*.so")) if package.is_dir() else []
        known["software.sgl_kernel_fa3"] = Fact(
            bool(parts), str(parts[0]) if parts else f"no flash_ops*.so in {package}"
        )
        if pin := next((text for text in dist.requires if re.match(r"torch\b(?![\w-])", text)), None):
            known["software.sgl_kernel_needs_torch"] = Fact(
                re.sub(r"^torch\s*\(?|\)?\s*(;.*)?$", "", pin).strip() or "any", str(dist.folder / "METADATA")
            )
    if kernel.value == ABSENT:
        known["software.sgl_kernel_fa3"] = Fact(False, kernel.source)
    return known


def _folders(known: dict[str, Fact], found: dict[str, list[Distribution]], folders: list[Path]) -> dict[str, Fact]:
    """Facts that a file inside a package tells, by the table ``[[markers]]``."""
    told: dict[str, Fact] = {}
    for marker in _tables()["markers"]:
        if known[marker["of"]].value == ABSENT:
            told[marker["fact"]] = Fact(False, known[marker["of"]].source)
            continue
        roots = [dist.root for name in marker["distributions"] for dist in found.get(name, ())] + folders
        paths = [root / inside for root in roots for inside in marker["any_of"]]
        there = [path for path in paths if path.exists()]
        text = marker.get("text")
        held = [path for path in there if text is None or _contains(path, text.encode())]
        told[marker["fact"]] = Fact(bool(held), str(held[0]) if held else f"no {marker['any_of'][0]} in {roots[0]}")
    for module in ("deep_gemm",):
        # DeepGEMM also comes inside the sgl-kernel wheel, without metadata of its own.
        inside = next((folder / module for folder in folders if (folder / module / "__init__.py").is_file()), None)
        if known[f"software.{module}"].value == ABSENT and inside:
            told[f"software.{module}"] = Fact("0", f"{inside} (part of another package, no version of its own)")
    return told


def _contains(path: Path, needle: bytes) -> bool:
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(needle) >= 0
    except (OSError, ValueError):
        return False


def _libraries(folders: list[Path]) -> dict[str, Fact]:
    """CUDA libraries that compiled extensions need, against those that are there."""
    extensions = [
        path for folder in folders for pattern in _tables()["extensions"] for path in sorted(folder.glob(pattern))
    ]
    if not extensions:
        return {}
    provided = elf.provided_libraries(folders)
    missing: dict[str, None] = {}
    for path in extensions:
        for library in elf.needed(path) or ():
            # The driver's own libraries come with the driver, not with an environment.
            if re.match(r"lib(cu(?!da\.so)|nv(?!idia)|nccl)", library) and library not in provided:
                missing[f"{library}<-{path.parent.name}/{path.name}"] = None
    source = f"ELF headers of {len(extensions)} extensions"
    return {
        "software.missing_libraries": Fact(tuple(missing), source),
        "software.libraries": Fact(
            tuple(sorted(name for name in provided if re.match(r"lib(cudart|nvrtc)\.so\.\d", name))), source
        ),
    }
