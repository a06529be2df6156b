"""A recorded forward as a program of the kernels: what the decoder does, without Python between its ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from zerogap.ops.native import calls as kernels
from zerogap.ops.native.packed import packed, plain, table
from zerogap.ops.native.plan import native_plan
from zerogap.ops.plan import AttentionPlan
from zerogap.ops.record import Instruction, Recording

_VERSION = attrgetter("_version")


@dataclass
class Program:
    """A forward over rows.

    Attributes:
        program: of the kernels.
        width: elements of a row of the result.
        linears: weights with their segments, whose packed copies the program reads.
        tables: embeddings, whose rows the program reads as `table` gives them.
        others: further weights; the program reads their own memory.
        places: where the weights lay when the program was made.
        counts: torch's counts of the weights' changes when their copies were last renewed; None: they are not known.
    """

    program: Any
    width: int
    linears: tuple[tuple[Tensor, int], ...]
    tables: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    places: list[int] = field(init=False)
    counts: list[int] | None = None

    def __post_init__(self) -> None:
        # Read before every step, when all of them are cold: each once, in one go.
        self._copied = [*[weight for weight, _ in self.linears], *self.tables]
        self._all = [*self._copied, *self.others]
        self._counted = not any(weight.is_inference() for weight in self._copied)  # torch does not count their changes
        self.places = self._places()

    def _places(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._all))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a decoder records its own: this one reads the memory of these weights.
        return type(None), ()

    def valid(self) -> bool:
        """Whether the weights still lie where they lay."""
        return self.places == self._places()

    def run(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        slots_R: Tensor,
        angles: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        cache: Any,
    ) -> Tensor:
        """Run the forward over R rows and return its result [R, width].

        Args:
            tokens_R: ids, int64.
            positions_R: absolute positions, int64.
            slots_R: where each row's key and value go, int64.
            angles: cosines and sines of all positions up to the greatest, [positions, D / 2].
            plan: which rows meet which keys.
            cache: keys and values (``zerogap_kernels.Cache``).
        """
        self._renew_copies()
        out_RK = torch.empty(len(tokens_R), self.width)
        kernels.call(
            self.program.run,
            tokens_R,
            positions_R,
            slots_R,
            *angles,
            native_plan(plan),
            cache,
            out_RK,
            torch.get_num_threads(),
        )
        return out_RK

    def _renew_copies(self) -> None:
        """Renew, in place, the copies of weights that have changed."""
        counts = list(map(_VERSION, self._copied)) if self._counted else None
        if counts is not None and counts == self.counts:
            return
        for weight, segments in self.linears:
            packed(weight, segments)
        for weight in self.tables:
            table(weight)
        self.counts = counts


def compile_program(recording: Recording) -> Program | None:
    """Make a program of a recording; None if it holds a sequence of ops that programs do not know."""
    builder = kernels.ProgramBuilder()
    for width in recording.widths:
        builder.value(width)
    maker = _Maker(builder, recording.widths)
    steps = list(recording.instructions)
    while steps:
        taken = maker.fused(steps) or maker.single(steps[0])
        if not taken:
            return None
        del steps[:taken]
    linears, tables, others = tuple(maker.linears), tuple(maker.tables), tuple(maker.others)
    last = recording.instructions[-1].output
    assert last is not None
    return Program(builder.build(), recording.widths[last], linears, tables, others)


class _Maker:
    """Puts instructions into a builder, several at once where a kernel does them in one pass."""

    def __init__(self, builder: Any, widths: list[int]) -> None:
        self.builder = builder
        self.widths = widths
        self.linears: list[tuple[Tensor, int]] = []
        self.tables: list[Tensor] = []
        self.others: list[Tensor] = []

    def fused(self, steps: list[Instruction]) -> int:
        """Add the kernel for the instructions at hand, if one does several; return how many it did."""
        ops = [step.op for step in steps[:5]]
        if ops[:2] == ["add", "rms_norm"] and steps[1].inputs == (steps[0].output,):
            self._add_norm(steps[0], steps[1])
            return 2
        if ops[:3] == ["rotary", "rotary", "store"]:
            return 3 if self._rotary(steps[0], steps[1], steps[2], None, None) else 0
        if ops == ["rms_norm", "rms_norm", "rotary", "rotary", "store"]:
            return 5 if self._rotary(*steps[2:5], *steps[:2]) else 0
        return 0

    def single(self, step: Instruction) -> int:
        """Add the kernel for one instruction; return 1, or 0 if there is none."""
        with_ = step.parameters
        builder = self.builder
        if step.op == "embedding":
            self.tables.append(with_["weight"])
            kernels.call(builder.embedding, step.output, table(with_["weight"]))
        elif step.op == "linear":
            self.linears.append((with_["weight"], with_["segments"]))
            bias = None if with_["bias"] is None else self._held(with_["bias"])
            kernels.call(builder.linear, step.output, *step.inputs, packed(with_["weight"], with_["segments"]), bias)
        elif step.op == "rms_norm" and len(with_["weight"]) == self.widths[step.inputs[0]]:
            kernels.call(builder.rms_norm, step.output, *step.inputs, self._held(with_["weight"]), with_["eps"])
        elif step.op == "add":
            builder.add(step.output, *step.inputs)
        elif step.op == "attention":
            builder.attention(step.output, *step.inputs, with_["heads"], with_["layer"], with_["scale"])
        elif step.op == "silu_mul":
            builder.silu_mul(step.output, *step.inputs)
        else:
            return 0
        return 1

    def _add_norm(self, add: Instruction, norm: Instruction) -> None:
        weight = self._held(norm.parameters["weight"])
        kernels.call(self.builder.add_rms_norm, norm.output, add.output, *add.inputs, weight, norm.parameters["eps"])

    def _rotary(
        self,
        q: Instruction,
        k: Instruction,
        store: Instruction,
        q_norm: Instruction | None,
        k_norm: Instruction | None,
    ) -> bool:
        if store.inputs[0] != k.output:
            return False
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        eps, q_in, k_in = 0.0, q.inputs[0], k.inputs[0]
        if q_norm is not None and k_norm is not None:
            if q.inputs != (q_norm.output,) or k.inputs != (k_norm.output,):
                return False
            eps = q_norm.parameters["eps"]
            if eps != k_norm.parameters["eps"]:
                return False
            q_in, k_in = q_norm.inputs[0], k_norm.inputs[0]
            weights = (self._held(q_norm.parameters["weight"]), self._held(k_norm.parameters["weight"]))
        heads, layer = q.parameters["heads"], store.parameters["layer"]
        kernels.call(self.builder.rotary, q.output, q_in, k_in, store.inputs[1], heads, layer, *weights, eps)
        return True

    def _held(self, weight: Tensor) -> Tensor:
        self.others.append(weight)
        return plain(weight)
