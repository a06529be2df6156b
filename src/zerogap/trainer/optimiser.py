"""AdamW with a schedule and a gradient norm whose bits do not depend on the thread count.

Parameters in 16 bits get a master each: a float32 value that AdamW moves and of which the parameter is the rounded one.
An update below half a step of the narrow format is so kept until enough of them have come together.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from zerogap.errors import UsageError, ZerogapError, nearest
from zerogap.ops import backend

Schedule = Literal["constant", "linear", "cosine"]

_NORM_CHUNK = 1 << 20
_NORM_BLOCK = 4096


@dataclass(frozen=True)
class OptimiserSettings:
    """AdamW (arXiv 1711.05101), its schedule and clipping.

    Attributes:
        learning_rate: the highest of the schedule.
        beta1: decay of the gradient's running mean, in [0, 1).
        beta2: decay of its running square, in [0, 1).
        epsilon: added to the root in the denominator.
        weight_decay: decoupled decay of matrices; norms and biases are never decayed.
        schedule: what follows the warm-up: ``constant``, ``linear`` or ``cosine`` down to ``final_share``.
        warmup_updates: updates over which the rate rises linearly; the first update already has a share of it.
        total_updates: update at which ``linear`` and ``cosine`` arrive at ``final_share``.
        final_share: last learning rate as a share of ``learning_rate``.
        max_grad_norm: gradients are scaled down to this 2-norm; 0 leaves them as they are.

    Raises:
        UsageError: a value out of its range.
    """

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup_updates: int = 0
    total_updates: int = 0
    final_share: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        ranges = {
            "learning_rate": 0 < self.learning_rate < math.inf,
            "beta1": 0 <= self.beta1 < 1,
            "beta2": 0 <= self.beta2 < 1,
            "epsilon": 0 < self.epsilon < math.inf,
            "weight_decay": 0 <= self.weight_decay < math.inf,
            "warmup_updates": self.warmup_updates >= 0,
            "final_share": 0 <= self.final_share <= 1,
            "max_grad_norm": 0 <= self.max_grad_norm < math.inf,
        }
        for name, fits in ranges.items():
            if not fits:
                raise UsageError(f"optimiser setting {name} = {getattr(self, name)} is out of its range")
        known = get_args(Schedule)
        if self.schedule not in known:
            raise UsageError(f"schedule {self.schedule!r} is none of {', '.join(known)}{nearest(self.schedule, known)}")
        if self.schedule != "constant" and self.total_updates <= self.warmup_updates:
            raise UsageError(
                f"schedule {self.schedule} needs total_updates above warmup_updates, not {self.total_updates} and "
                f"{self.warmup_updates}"
            )


def learning_rate(settings: OptimiserSettings, update: int) -> float:
    """Return the learning rate of an update.

    Args:
        settings: schedule.
        update: 0 for the first.
    """
    if update < settings.warmup_updates:
        return settings.learning_rate * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.learning_rate
    done = min(1.0, (update - settings.warmup_updates) / (settings.total_updates - settings.warmup_updates))
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * left)


def sum_of_squares(values: Tensor) -> float:
    """Return the float64 sum of squares, by an order that depends on the number of values only.

    The library's own norm splits long inputs by thread count. Here blocks of 4096 are summed one thread each; the block
    sums are added without rounding in between (portable) or in ascending order (native).

    Args:
        values: any shape, contiguous.
    """
    if backend.native_serves(values):
        return _native().sum_of_squares(values)
    sums: list[float] = []
    for chunk in values.reshape(-1).split(_NORM_CHUNK):
        squares = chunk.double().square()
        whole = len(squares) // _NORM_BLOCK * _NORM_BLOCK
        if whole:
            sums += squares[:whole].view(-1, _NORM_BLOCK).sum(1).tolist()
        sums += squares[whole:].tolist()
    # fsum raises on overflow and on inf - inf; squares are never negative, so a plain sum finds those.
    return math.fsum(sums) if math.isfinite(sum(sums)) else math.nan


@dataclass(frozen=True)
class UpdateStats:
    """What one update did.

    Attributes:
        grad_norm: 2-norm of all gradients before clipping; 0 if nothing was trained.
        learning_rate: the rate it was applied with.
        clipped: the gradients were scaled down.
    """

    grad_norm: float
    learning_rate: float
    clipped: bool


class Optimiser:
    """AdamW over a model's named parameters: the native kernels' in one pass where they serve, else torch's.

    A parameter in bfloat16 or float16 is moved through its master, in float32, and then is the master rounded to
    nearest even. Its gradients are float32 and add up in float32 from one backward to the next. Masters begin at the
    parameters' own values.

    Of torch's it is the function, with ``foreach`` and ``fused`` off: the plain loop has the smallest peak (one
    parameter's temporaries) and one order. The class would import torch's compiler, 60 MiB and a second or two.

    Args:
        parameters: (name, parameter) pairs, such as ``model.named_parameters()``.
        settings: hyperparameters.

    Attributes:
        parameters: of the model, by name.
        masters: what AdamW moves, by name: a wide parameter itself, else its master.
        updates: done so far.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimiserSettings) -> None:
        self.settings = settings
        self.parameters = dict(parameters)
        self.masters = {name: _master(parameter) for name, parameter in self.parameters.items()}
        self.updates = 0
        self._state: dict[str, dict[str, Tensor]] = {}  # moments and counts by name, from a parameter's first update on

    def clear_gradients(self) -> None:
        """Drop all gradients, giving their memory back."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def apply(self) -> UpdateStats:
        """Clip the gradients, move the weights, drop the gradients and count the update.

        Without any gradient (a batch in which every advantage is 0) the weights and moments stay, and the update
        counts for the schedule.

        Raises:
            ZerogapError: a gradient is not finite; weights, masters and moments are untouched.
        """
        rate = learning_rate(self.settings, self.updates)
        squares = {name: sum_of_squares(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        bad = [name for name, square in squares.items() if not math.isfinite(square)]
        if bad:
            raise ZerogapError(
                f"update {self.updates}: the gradient of {bad[0]} (and {len(bad) - 1} more) is not finite; "
                "the weights are unchanged; lower the learning rate or look at the step's log-probs"
            )
        norm = math.sqrt(math.fsum(squares.values()))
        limit = self.settings.max_grad_norm
        clipped = 0 < limit < norm
        scale = limit / norm if clipped else 1.0
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            step = self._native_step if backend.native_serves(master) else self._torch_step
            step(name, gradient, rate, scale)
            _round_into(parameter, master)
        self.updates += 1
        return UpdateStats(norm, rate, clipped)

    def _native_step(self, name: str, gradient: Tensor, rate: float, scale: float) -> None:
        master, state, settings = self.masters[name], self._state_of(name), self.settings
        state["step"] += 1
        _native().adamw_step(
            master,
            gradient,
            (state["exp_avg"], state["exp_avg_sq"]),
            int(state["step"]),
            rate,
            (settings.beta1, settings.beta2),
            settings.epsilon,
            self._decay(master),
            scale,
        )

    def _torch_step(self, name: str, gradient: Tensor, rate: float, scale: float) -> None:
        master, state, settings = self.masters[name], self._state_of(name), self.settings
        with torch.no_grad():
            adamw(
                [master],
                [gradient if scale == 1.0 else gradient.mul_(scale)],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [],
                [state["step"]],
                foreach=False,
                fused=False,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=rate,
                weight_decay=self._decay(master),
                eps=settings.epsilon,
                maximize=False,
            )

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self._state:  # as torch begins
            moments = {what: torch.zeros_like(self.masters[name], requires_grad=False) for what in _MOMENTS[1:]}
            self._state[name] = {"step": torch.tensor(0.0), **moments}
        return self._state[name]

    def _decay(self, master: Tensor) -> float:
        return self.settings.weight_decay if master.dim() >= 2 else 0.0

    def state_tensors(self) -> dict[str, Tensor]:
        """Return masters, moments and counts under ``<what>.<parameter name>``; not copies."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                tensors[f"{_MASTER}.{name}"] = master.detach()
            tensors |= {f"{what}.{name}": tensor for what, tensor in self._state.get(name, {}).items()}
        return tensors

    def restore(self, updates: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the state of another optimiser of the same parameters, bit for bit.

        Args:
            updates: updates done so far.
            tensors: pairs as in `state_tensors`; the optimiser keeps the tensors it is given.

        Raises:
            UsageError: a tensor that fits no parameter, a parameter with half a state, or a master that does not round
                to its parameter.
        """
        state: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in tensors:
            what, _, name = full_name.partition(".")
            parameter = self.parameters.get(name)
            shape = None if parameter is None else {"step": torch.Size()}.get(what, parameter.shape)
            if what not in (_MASTER, *_MOMENTS) or shape != tensor.shape:
                raise UsageError(
                    f"optimiser state {full_name} {list(tensor.shape)} fits no parameter of this model; "
                    "the checkpoint belongs to another one"
                )
            state.setdefault(name, {})[what] = tensor
        for name, parameter in self.parameters.items():
            self._check_state(name, parameter, state.get(name, {}))
        self._state = {}
        for name, parts in state.items():
            master = self.masters[name]
            if _MASTER in parts:
                master.data.copy_(parts.pop(_MASTER))
            if parts:
                self._state[name] = {
                    what: tensor if what == "step" else tensor.to(master.device) for what, tensor in parts.items()
                }
        self.updates = updates

    def _check_state(self, name: str, parameter: nn.Parameter, parts: dict[str, Tensor]) -> None:
        narrow = self.masters[name] is not parameter
        needed = {*((_MASTER,) if narrow else ()), *(_MOMENTS if parts.keys() - {_MASTER} else ())}
        if parts.keys() != needed:
            lacks, extra = sorted(needed - parts.keys()), sorted(parts.keys() - needed)
            said = f"lacks {', '.join(lacks)}" if lacks else f"has {', '.join(extra)}, which its format does not need"
            raise UsageError(f"optimiser state of {name} {said}")
        if narrow and not torch.equal(parts[_MASTER].to(parameter.dtype), parameter.detach().cpu()):
            raise UsageError(
                f"the master of {name} does not round to the weight; the checkpoint's weights and its optimiser state "
                "belong to different updates"
            )


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype.itemsize != 2:
        return parameter
    # Ops give gradients of weights in float32; this keeps autograd from rounding them to the parameter's format.
    parameter.grad_dtype = torch.float32
    return nn.Parameter(parameter.detach().float())


def _round_into(parameter: nn.Parameter, master: nn.Parameter) -> None:
    if master is not parameter:
        with torch.no_grad():
            parameter.copy_(master)  # to nearest, ties to even


def _native() -> ModuleType:
    return importlib.import_module("zerogap.ops.native.adamw")


_MASTER = "master"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
