"""The kernels that a stage of ``bench/gpu.sh`` launches, found without launching any.

    python bench/gpu_noting.py ARCHITECTURE CASE FILE

writes the kernels of a case as JSON. The stage's own code runs on the CPU with every launch noted down instead; what a
kernel would have written is zeros.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_stages
from gpu_kernels import CASES, Spec


@contextmanager
def noted(architecture: str) -> Iterator[dict[str, Spec]]:
    """Let Triton's ops serve on the CPU within the body, launching nothing; yield what would have been launched."""
    import torch

    from zerogap.ops import backend, triton
    from zerogap.ops.triton.aot import compile_options
    from zerogap.ops.triton.targets import TARGETS

    target = TARGETS[architecture]
    found: dict[str, Spec] = {}

    def note(kernel: Any, arguments: Sequence[Any], constexprs: dict[str, Any], options: dict[str, Any]) -> None:
        spec = _spec(kernel, arguments, constexprs, options, target.gpu_target())
        found.setdefault(json.dumps(spec, sort_keys=True), spec)

    def launch(kernel: Any, grid: Any, arguments: Any, constexprs: Any, where: Any, warps: int, stages: int) -> None:
        note(kernel, arguments, constexprs, {"num_warps": warps, "num_stages": stages})

    def run(config: Any, grid: tuple[int, ...], *arguments: Any) -> None:
        if 0 not in grid:
            pinned = compile_options(replace(config, options={}), target)
            switches = {"num_warps": pinned["num_warps"], "num_stages": pinned["num_stages"], **config.options}
            note(config.function, arguments, config.constexprs, switches)

    def zeros(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **words: make(*arguments, **words).zero_()

    with ExitStack() as stack:
        patch = lambda thing, name, new: stack.enter_context(mock.patch.object(thing, name, new))  # noqa: E731
        for found_module in pkgutil.iter_modules(triton.__path__):
            module = importlib.import_module(f"zerogap.ops.triton.{found_module.name}")
            for ours, new in (("launch", launch), ("run", run), ("detect", lambda device: target)):
                if hasattr(module, ours):
                    patch(module, ours, new)
        for thing, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch(thing, name, zeros(getattr(thing, name)))
        patch(torch, "randn", lambda *size, generator=None, **words: torch.zeros(*size, **words))
        patch(torch.Tensor, "normal_", lambda self, *_, **__: self)
        patch(backend, "of_dtype", lambda dtype: triton)
        patch(backend, "cpu_backend", lambda: "portable")
        yield found


def _spec(kernel: Any, arguments: Sequence[Any], constexprs: dict[str, Any], options: dict[str, Any], gpu: Any) -> Spec:
    """Return kernel, types, constants and options as Triton's own launcher would find them."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(gpu))
    _, found, _ = bind(*arguments, **constexprs)
    types = {name: tuple(one) for name, one in zip(kernel.arg_names, found, strict=True)}
    return {
        "kernel": f"{kernel.fn.__module__}:{kernel.fn.__name__}",
        "signature": {name: kind for name, (kind, _) in types.items()},
        "aligned": [i for i, (_, special) in enumerate(types.values()) if special == "D"],
        "constexprs": constexprs,
        "options": options,
    }


def certify(folder: Path) -> None:
    """``zerogap certify --quick`` in bfloat16."""
    import torch

    import gpu_models
    from zerogap.certify import command
    from zerogap.certify.subjects import Place
    from zerogap.models.config import ModelConfig

    model = gpu_models.TINY
    place = Place(torch.device("cpu"), torch.bfloat16)
    command._lines(model, ModelConfig.from_folder(model), False, lambda text: None, place)


def qwen3(folder: Path) -> None:
    """Engine against trainer in the shape of Qwen3-0.6B; layers are alike, so one is enough."""
    import torch

    import gpu_models
    from zerogap.certify.whole import check_end_to_end

    check_end_to_end(*gpu_models.random_model("0.6b", "cpu", torch.bfloat16, layers=1), full=False)


def decode(folder: Path) -> None:
    """The engine in the shape of Qwen3-4B."""
    import torch

    import gpu_models
    import gpu_timing

    decoder, tokenizer = gpu_models.random_model("4b", "cpu", torch.bfloat16, layers=1)
    for sequences in gpu_timing.SEQUENCES:
        gpu_timing.tokens_per_second(decoder, tokenizer, sequences, dry=False)


def linear(folder: Path) -> None:
    """The table of linear layers."""
    _stage("linear", folder)


def attention(folder: Path) -> None:
    """The table of decode attention."""
    _stage("attention", folder)


def _stage(name: str, folder: Path) -> None:
    from torch.nn import functional

    import gpu_timing

    with (
        mock.patch.object(gpu_timing, "copy_bandwidth", return_value=1.0),
        mock.patch.object(gpu_timing, "seconds", lambda call, device: (call(), 1.0)[1]),
        mock.patch.object(functional, "linear", lambda x, weight: x),
    ):
        gpu_stages.STAGES[name](gpu_stages.Record(folder / f"{name}.json", "cpu", False))


def quickstart(folder: Path) -> None:
    """One step of configs/quickstart.toml."""
    from zerogap.rl.command import train_command

    settings = [f"run.dir={folder / 'run'}", "run.steps=1", "eval.prompts=8", "rollout.prompts_per_step=4"]
    train_command(gpu_stages.ROOT / "configs" / "quickstart.toml", settings, None, True)


def main(architecture: str, case: str, file: str) -> None:
    """Note down the kernels of a case."""
    stages = {each.__name__: each for each in (certify, qwen3, linear, attention, decode, quickstart)}
    assert set(stages) == set(CASES)
    with tempfile.TemporaryDirectory() as folder, noted(architecture) as found:
        stages[case](Path(folder))
    Path(file).write_text(json.dumps(list(found.values())))


if __name__ == "__main__":
    main(*sys.argv[1:4])
