"""The GPU architectures that the kernels are built for: limits, matrix instruction, and the compiler switches pinned.

A switch that changes bits is never left at its default: defaults differ between Triton versions (3.9 turns
floating-point fusion off, 3.6 has it on) and can be set from the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerogap.errors import UsageError
from zerogap.ops.triton import dry

if TYPE_CHECKING:
    import torch
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        name: as it is written in tables and records.
        backend: ``cuda`` or ``hip``; ``interpreter`` runs kernels on the CPU for tests.
        arch: compute capability times ten, or the gfx name.
        warp_size: threads that execute together.
        shared_memory: bytes that one program may use.
        instruction: kind of the 16-bit matrix instruction that all variants of an op use.
        min_rows: rows of the smallest tile that compiles to it. Below it the compiler would pick another kind, with
            other bits: ``wgmma`` and ``tcgen05`` take at least one whole tile of rows, be they padding.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int
    instruction: str
    min_rows: int

    def gpu_target(self) -> GPUTarget:
        """Return what Triton's compiler calls this target."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


def _nvidia(capability: int, shared_kib: int, instruction: str, min_rows: int) -> Target:
    return Target(f"sm_{capability}", "cuda", capability, 32, shared_kib * 1024, instruction, min_rows)


# Shared memory: table "Technical Specifications per Compute Capability" of the CUDA C++ programming guide, per block;
# LDS sizes: CDNA 3 and CDNA 4 instruction set guides.
TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 163, "mma", 16),
        _nvidia(86, 99, "mma", 16),
        _nvidia(89, 99, "mma", 16),
        _nvidia(90, 227, "wgmma", 64),
        _nvidia(100, 227, "tcgen05", 128),
        _nvidia(103, 227, "tcgen05", 128),
        _nvidia(120, 99, "mma", 16),
        _nvidia(121, 99, "mma", 16),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024, "mfma", 16),
        Target("gfx950", "hip", "gfx950", 64, 160 * 1024, "mfma", 16),
    )
}
INTERPRETER = Target("interpreter", "interpreter", "interpreter", 32, 1 << 30, "none", 16)

_PINNED: dict[str, dict[str, Any]] = {
    "cuda": {
        "enable_fp_fusion": False,  # a*b+c stays two roundings, in ptxas too
        "enable_reflect_ftz": False,  # library functions keep subnormal numbers
        "default_dot_input_precision": "ieee",
        "allowed_dot_input_precisions": ("ieee",),  # a forgotten TF32 does not compile
        "ptx_options": "",  # PTXAS_OPTIONS of the environment
    },
    "hip": {
        "enable_fp_fusion": False,
        "allow_flush_denorm": False,
        "default_dot_input_precision": "ieee",
        "allowed_dot_input_precisions": ("ieee",),
        "matrix_instr_nonkdim": 16,  # else 16 or 32, by tile
        "kpack": 1,
    },
    "interpreter": {},
}
# What the environment can set and no launch can override; a run with one of them set would be another program. (Those
# that a launch overrides, as TRITON_DEFAULT_FP_FUSION and TRITON_F32_DEFAULT, need no refusal.)
_REFUSED = (
    "DISABLE_LLVM_OPT",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "DISABLE_PTXAS_OPT",
    "LLVM_PASS_PLUGIN_PATH",
    "TRITON_AMD_CODEGEN_PATH",
    "TRITON_ENABLE_ASAN",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_PLUGIN_PATHS",
)


def pinned(target: Target) -> dict[str, Any]:
    """Return the compiler switches that every launch and every ahead-of-time build on ``target`` states.

    Raises:
        UsageError: the environment sets a switch that changes code and cannot be overridden.
    """
    for name in _REFUSED:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UsageError(f"the environment sets {name}, which changes what kernels compute; unset it")
    return dict(_PINNED[target.backend])


def detect(device: torch.device) -> Target:
    """Return the architecture of a device.

    Raises:
        UsageError: no kernels are built for it.
    """
    import torch

    if (noted := dry.notes()) is not None:
        return noted.target
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    if device.type != "cuda":
        raise UsageError(f"Triton kernels need a CUDA or ROCm GPU, not the device {device}; use the native backend")
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
    if name not in TARGETS:
        raise UsageError(f"no kernels are built for {name} ({device}); supported: {', '.join(TARGETS)}")
    return TARGETS[name]
