"""Brings along what a lent GPU machine lacks: wheels are fetched where there is a network, unpacked where not.

    python bench/gpu_wheels.py pack [PYTHON_VERSION [PACKAGE ...]]   fetch into bench/wheels/ (default 3.12, all)
    python bench/gpu_wheels.py unpack                                unpack those that are missing; print the folder

Needs the standard library alone.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

WHEELS = Path(__file__).parent / "wheels"
# What `zerogap certify` and `train`, and the tests, import beside torch, triton, transformers and what those bring.
PACKAGES = (
    "absl-py", "annotated-doc", "annotated-types", "attrs", "click", "execnet", "google-re2", "grpcio", "hypothesis",
    "iniconfig", "jinja2", "markdown", "markdown-it-py", "markupsafe", "mdurl", "nvidia-ml-py", "packaging", "pillow",
    "pluggy", "protobuf", "psutil", "pyarrow", "pydantic", "pygments", "pytest", "pytest-timeout", "pytest-xdist",
    "rich", "shellingham", "sortedcontainers", "tensorboard", "tensorboard-data-server", "typer", "typing-inspection",
    "werkzeug",
)  # fmt: skip
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def pack(python: str, packages: Sequence[str] = PACKAGES) -> int:
    """Fetch a wheel of each package for CPython ``python`` on Linux x86-64; say which could not be had.

    Where only so much may travel, name the packages that the machine lacks.
    """
    if not re.fullmatch(r"3\.\d+", python):
        print(f"--pack {python!r}: must be the machine's Python, such as 3.12", file=sys.stderr)
        return 2
    WHEELS.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["-d", str(WHEELS), "--python-version", python, "--implementation", "cp"]
    command += [part for platform in _PLATFORMS for part in ("--platform", platform)]
    missing = []
    if subprocess.run([*command, *packages], check=False).returncode:  # some is not to be had: one by one
        missing = [name for name in packages if subprocess.run([*command, name], check=False).returncode]
    for path in WHEELS.glob("pydantic-[0-9]*.whl"):  # it takes one version of its core and no other
        core = re.search(r"^Requires-Dist: (pydantic-core==[^\s;]+)", _metadata(path), re.MULTILINE)
        if core and subprocess.run([*command, core[1]], check=False).returncode:
            missing.append(core[1])
    wheels = list(WHEELS.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 2**20:.0f} MiB, in {WHEELS}")
    if missing:
        print(f"not found for Python {python}: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def unpack(wheels: Path = WHEELS) -> Path | None:
    """Unpack the wheels of packages that this interpreter lacks; return the folder for its path, None without any."""
    site = wheels / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    for path in sorted(wheels.glob("*.whl")):
        name, version, *_ = path.name.split("-")
        if _installed(name) or not _fits(path) or (site / f"{name}-{version}.dist-info").is_dir():
            continue
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    return site if site.is_dir() else None


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _fits(wheel: Path) -> bool:
    """Return whether a wheel is for this Python: one folder may hold those for several."""
    python, abi = wheel.stem.split("-")[-3:-1]
    ours = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return abi in ("none", "abi3") or ours in python.split(".")


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


if __name__ == "__main__":
    if sys.argv[1:2] == ["pack"]:
        sys.exit(pack(sys.argv[2] if len(sys.argv) > 2 else "3.12", sys.argv[3:] or PACKAGES))
    folder = unpack()
    print("" if folder is None else folder)
