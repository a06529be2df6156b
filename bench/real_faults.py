"""Faults made for real with our own engine and trainer, and found from the run folder alone.

Each fault changes one thing in a `zerogap train` run of the built-in model with the gate on "warn", so that the run
goes on and writes its files; `zerogap gap` then reads the folder.

    python bench/real_faults.py [--steps 6]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import zerogap.engine.scheduler
import zerogap.rl.command
import zerogap.rl.loop
import zerogap.rl.setup
from zerogap.cli import run
from zerogap.engine import Engine
from zerogap.engine.pages import PagePool
from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.readers import load
from zerogap.models.weights import weights_digest
from zerogap.rl.loop import Loop
from zerogap.trainer import TrainSequence

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"
# The model answers in about four tokens; faults that do not need an update are shown on longer text.
LONG = ("rollout.max_tokens=24", "rollout.min_tokens=24", "rollout.prompts_per_step=12", "run.steps=2")
SETTINGS = ("rollout.prompts_per_step=24", "rollout.samples_per_prompt=8", "eval.every=0",
            "reward.workers=1", "gap.gate=warn",
            "gap.scope=all", "train.learning_rate=1e-3", "train.warmup_steps=0")  # fmt: skip
Patch = Callable[[contextlib.ExitStack], None]


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def stale_weights(stack: contextlib.ExitStack) -> None:
    """The engine keeps the weights of the first step."""
    first: dict[str, torch.Tensor] = {}

    def send(self: Loop, version: int) -> None:
        if not first:
            first.update({name: weight.clone() for name, weight in self.run_.engine.decoder.state_dict().items()})
        self.run_.engine.load_weights(first, version, weights_digest(first))

    _set(stack, Loop, "_send_weights", send)


def _sampler(**changes: float) -> Patch:
    """The trainer scores with other sampler settings than the engine sampled with."""

    def patch(stack: contextlib.ExitStack) -> None:
        make = zerogap.rl.loop.train_sequence

        def changed(rollout: Any, advantage: float, params: Any) -> TrainSequence:
            return make(rollout, advantage, dataclasses.replace(params, **changes))

        _set(stack, zerogap.rl.loop, "train_sequence", changed)

    return patch


def shifted(stack: contextlib.ExitStack) -> None:
    """The engine's log-probs arrive one place late."""
    generate = Engine.generate

    def changed(self: Engine, requests: Any) -> Any:
        done = generate(self, requests)
        for completion in done:
            completion.logprobs[:] = completion.logprobs[-1:] + completion.logprobs[:-1]
        return done

    _set(stack, Engine, "generate", changed)


def _engine(change: Callable[[Any], None]) -> Patch:
    """The engine's decoder is changed after set-up."""

    def patch(stack: contextlib.ExitStack) -> None:
        for module in (zerogap.rl.command, zerogap.rl.setup):
            if hasattr(module, "set_up"):
                make = module.set_up

                def changed(config: Any, resume: str | None, make: Any = make) -> Any:
                    made = make(config, resume)
                    change(made)
                    return made

                _set(stack, module, "set_up", changed)

    return patch


def _other_base(power: float) -> Patch:
    """The engine's rotary base is the trainer's to the power of ``power``."""

    def change(made: Any) -> None:
        decoder = made.engine.decoder
        rope = decoder.config.rope
        other = dataclasses.replace(rope, inverse_frequencies=tuple(f**power for f in rope.inverse_frequencies))
        decoder.config = dataclasses.replace(decoder.config, rope=other)

    return _engine(change)


def _rounded(to: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """The engine's weights are rounded at every sync, the trainer's stay float32."""

    def rounded(made: Any) -> dict[str, torch.Tensor]:
        return {name: to(weight) for name, weight in made.decoder.state_dict().items()}

    def send(self: Loop, version: int) -> None:
        state = rounded(self.run_)
        self.run_.engine.load_weights(state, version, weights_digest(state))

    def patch(stack: contextlib.ExitStack) -> None:
        _set(stack, Loop, "_send_weights", send)
        _engine(lambda made: made.engine.load_weights(rounded(made), 0))(stack)

    return patch


def _four_bits(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax(-1, keepdim=True) / 7
    return (weight / scale).round() * scale


def kept_cache(stack: contextlib.ExitStack) -> None:
    """Pages cached under old weights are found under new ones."""
    constant = zerogap.engine.scheduler.root_key(0)
    _set(stack, zerogap.engine.scheduler, "root_key", lambda version: constant)
    _set(stack, PagePool, "drop_published", lambda self: None)


FAULTS: dict[str, tuple[Patch, tuple[str, ...], set[str]]] = {
    "none": (lambda stack: None, (), set()),
    "stale weights": (stale_weights, (), {"weights-differ/sync-not-applied"}),
    "temperature on the engine only": (
        _sampler(temperature=1.0),
        (*LONG, "rollout.temperature=0.6"),
        {"sampler/temperature"},
    ),
    "other rotary base": (_other_base(0.6), LONG, {"inputs-differ/positions"}),
    "rotary base a little lower": (_other_base(0.8), (*LONG, "run.seed=5"), {"inputs-differ/positions"}),
    "rotary base higher": (_other_base(1.25), (*LONG, "run.seed=6"), {"inputs-differ/positions"}),
    "4-bit weights on the engine": (_rounded(_four_bits), LONG, {"numerics/contract-broken"}),
    "log-probs shifted by one": (shifted, LONG, {"inputs-differ/off-by-one"}),
    "top-p without replay": (_sampler(top_p=1.0), (*LONG, "rollout.top_p=0.8"), {"sampler/truncation"}),
    "prefix cache kept over updates": (kept_cache, (), {"stale-state/prefix-cache"}),
    "bf16 weights on the engine": (
        _rounded(lambda weight: weight.bfloat16().float()),
        (),
        {"numerics/dtype-or-kernel", "numerics/contract-broken"},
    ),
}


@contextlib.contextmanager
def made(name: str) -> Iterator[tuple[str, ...]]:
    """Put a fault in place for the duration of a run; yields the settings it needs."""
    patch, settings, _ = FAULTS[name]
    with contextlib.ExitStack() as stack:
        patch(stack)
        yield (*settings, "engine.weights=own")  # faults that one side alone has


def verdict_of(name: str, folder: Path, steps: int) -> Verdict:
    """Run one faulty training and judge its folder."""
    with made(name) as settings, contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        code = run(["train", str(QUICKSTART), f"run.dir={folder}", f"run.steps={steps}", *SETTINGS, *settings])
    assert code in (0, 1), f"{name}: zerogap train ended with {code}"
    return judge(load(folder), Options())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    print(f"{'fault':<34} {'found':<6} {'mean abs(d)':>11}  diagnoses")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (_, _, wanted)) in enumerate(FAULTS.items()):
            if arguments.only not in name:
                continue
            verdict = verdict_of(name, Path(folder) / str(number), arguments.steps)
            faults = {f.name for f in verdict.findings if f.level == "fault"}
            ok = bool(faults & wanted) if wanted else verdict.status == "zero"
            mean = verdict.numbers.mean_abs if verdict.numbers else float("nan")
            print(f"{name:<34} {'yes' if ok else 'NO':<6} {mean:>11.4g}  {', '.join(sorted(faults)) or verdict.status}")


if __name__ == "__main__":
    main()
