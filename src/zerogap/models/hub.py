"""Where a model's folder is: shipped in the package, on this disk, or on the Hugging Face hub."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from zerogap.errors import UsageError, nearest

BUILTIN = "builtin:"
# Weights only as safetensors: other formats are pickles, which can run code.
WANTED_FILES = ("*.safetensors", "*.json", "*.jinja")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(path_or_name: str) -> Path:
    """Return the Hugging Face folder of a model; hub models are downloaded into the hub's own cache first.

    Args:
        path_or_name: ``builtin:NAME``, a local folder, or a hub name ``owner/name``. A local folder wins over a hub
            model of the same name.

    Raises:
        UsageError: there is no such model, or its folder lacks ``config.json`` or safetensors weights.
    """
    if path_or_name.startswith(BUILTIN):
        return _builtin(path_or_name.removeprefix(BUILTIN))
    try:
        folder = Path(path_or_name).expanduser()
        exists = folder.exists()
    except (RuntimeError, OSError) as error:  # no such home folder; a name too long
        raise UsageError(f"model folder {path_or_name[:80]!r} cannot be looked up: {error.args[-1]}") from None
    if exists:
        return check_folder(folder)
    if _is_hub_name(path_or_name):
        return check_folder(_download(path_or_name))
    raise UsageError(f"model folder {path_or_name!r} does not exist{_nearest_sibling(folder)}")


def check_folder(folder: Path) -> Path:
    """Return ``folder`` if it holds a configuration and safetensors weights.

    Raises:
        UsageError: it is no folder, or lacks one of them.
    """
    if not folder.is_dir():
        raise UsageError(f"model path {str(folder)!r} is a file: give the folder that holds config.json")
    try:
        names = {p.name for p in folder.iterdir()}
    except OSError as error:
        raise UsageError(f"model folder {str(folder)!r} cannot be read: {error.strerror}") from error
    if "config.json" not in names:
        raise UsageError(
            f"model folder {str(folder)!r} has no config.json{nearest('config.json', names)}: "
            "give a folder as transformers' save_pretrained writes it"
        )
    if not names & {"model.safetensors", "model.safetensors.index.json"}:
        other = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
        found = f"; it holds {', '.join(other[:3])}" if other else ""
        raise UsageError(
            f"model folder {str(folder)!r} has no model.safetensors and no model.safetensors.index.json{found}: "
            "save the weights with transformers' save_pretrained"
        )
    return folder


def _builtin(name: str) -> Path:
    root = Path(str(files("zerogap"))) / "data"
    known = sorted(p.parent.name for p in root.glob("*/config.json"))
    if name not in known:
        raise UsageError(
            f"no built-in model {name!r}{nearest(name, known)}; built in: {', '.join(BUILTIN + k for k in known)}"
        )
    return check_folder(root / name)


def _is_hub_name(name: str) -> bool:
    """``owner/name``, unless ``owner`` is a folder here: then a mistyped path is likelier than a hub model."""
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).parent.is_dir()


def _download(name: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    what = f"model {name!r} is no local folder and"
    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED_FILES)))
    except GatedRepoError as error:
        raise UsageError(
            f"{what} is gated on the hub: accept its terms there, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{what} the hub knows none of that name: check the name, or log in with `hf auth login` if it is private"
        ) from error
    except HFValidationError as error:
        raise UsageError(f"{what} is not a valid hub name: give owner/name or an existing folder") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise UsageError(
            f"{what} could not be fetched from the hub ({type(error).__name__}): check the connection and "
            "HF_HUB_OFFLINE, or give a folder on this disk"
        ) from error


def _nearest_sibling(folder: Path) -> str:
    try:
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()]
    except OSError:
        return f": its parent {str(folder.parent)!r} does not exist either"
    return nearest(folder.name, siblings) or ": give an existing folder, a hub name owner/name, or builtin:tiny-qwen3"
