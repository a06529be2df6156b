"""The ops of a forward as a list: what `zerogap.models.decoder` computes, written down once instead of computed.

A backend that can run a whole forward at once (the native kernels) gets it from the one decoder definition: the decoder
is called with symbols in place of tensors, and every op that it calls notes itself down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Instruction:
    """One op: its name, the numbers of the values it reads, the number of the one it makes (None: only stores)."""

    op: str
    inputs: tuple[int, ...]
    output: int | None
    parameters: dict[str, Any]


@dataclass(eq=False)
class Recording:
    """What was noted down.

    Attributes:
        instructions: in the order of the calls.
        widths: elements per row of each value.
    """

    instructions: list[Instruction] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def add(self, op: str, inputs: tuple[Symbol, ...], width: int | None, **parameters: Any) -> Symbol:
        """Note an op down and return its result."""
        number = None
        if width is not None:
            number = len(self.widths)
            self.widths.append(width)
        self.instructions.append(Instruction(op, tuple(symbol.number for symbol in inputs), number, parameters))
        return Symbol(self, -1 if number is None else number, width or 0)


@dataclass(frozen=True, eq=False)
class Symbol:
    """Stands for rows [R, width], or for heads [R, heads, width / heads]."""

    recording: Recording
    number: int
    width: int
    heads: int | None = None

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Symbol:
        """See the rows as heads."""
        assert dim == 1
        assert sizes[0] * sizes[1] == self.width
        return Symbol(self.recording, self.number, self.width, sizes[0])

    def flatten(self, start_dim: int) -> Symbol:
        """See heads as rows."""
        assert start_dim == 1
        return Symbol(self.recording, self.number, self.width)

    def __add__(self, other: Symbol) -> Symbol:
        return self.recording.add("add", (self, other), self.width)


@dataclass(frozen=True, eq=False)
class CacheLayer:
    """Stands for a layer's keys or values."""

    layer: int


class RecordedRows:
    """Stands for the rows of a batch: their plan is known only when the forward runs."""

    plan = None


class RecordedCache:
    """Stands for a KV cache: notes down what is stored."""

    def update(self, layer: int, k_RGD: Symbol, v_RGD: Symbol, rows: Any) -> tuple[CacheLayer, CacheLayer]:
        """Note down that keys and values are stored."""
        k_RGD.recording.add("store", (k_RGD, v_RGD), None, layer=layer)
        return CacheLayer(layer), CacheLayer(layer)


# The ops as `zerogap.ops` names them.


def linear(x: Symbol, weight_NK: Tensor, bias_N: Tensor | None = None, segments: int = 1) -> Symbol:
    """Note a linear layer down."""
    return x.recording.add("linear", (x,), len(weight_NK), weight=weight_NK, bias=bias_N, segments=segments)


def rms_norm(x: Symbol, weight_K: Tensor, eps: float) -> Symbol:
    """Note a norm over rows or heads down."""
    result = x.recording.add("rms_norm", (x,), x.width, weight=weight_K, eps=eps)
    return Symbol(x.recording, result.number, x.width, x.heads)


def rotary(x: Symbol, cos_RD: Symbol, sin_RD: Symbol) -> Symbol:
    """Note a rotation of heads down; the angles are those of the rows' positions."""
    result = x.recording.add("rotary", (x,), x.width, heads=x.heads)
    return Symbol(x.recording, result.number, x.width, x.heads)


def silu_mul(gate_RI: Symbol, up_RI: Symbol) -> Symbol:
    """Note a gated activation down."""
    return gate_RI.recording.add("silu_mul", (gate_RI, up_RI), gate_RI.width)


def embedding(ids_R: Symbol, weight_VK: Tensor) -> Symbol:
    """Note the look-up of the rows' tokens down."""
    return ids_R.recording.add("embedding", (), weight_VK.shape[1], weight=weight_VK)


def attention(q_RHD: Symbol, keys: CacheLayer, values: CacheLayer, plan: Any, scale: float) -> Symbol:
    """Note attention over a layer's keys and values down."""
    result = q_RHD.recording.add("attention", (q_RHD,), q_RHD.width, layer=keys.layer, heads=q_RHD.heads, scale=scale)
    return Symbol(q_RHD.recording, result.number, q_RHD.width, q_RHD.heads)
