"""Every kernel in every configuration that a run may launch, and how to build one without a GPU.

A module of kernels lists them in ``KERNELS`` (the same on all architectures) or returns them from ``configs(target)``.
The tests build the whole list for each architecture and read instruction, shared memory and spills from the result.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerogap.ops.triton.targets import Target, pinned


@dataclass(frozen=True)
class KernelConfig:
    """One kernel as it is launched.

    Attributes:
        name: op and variant, unique within an architecture, such as ``linear/decode``.
        function: the ``@triton.jit`` function.
        signature: type of each argument that is no constant, in Triton's words: ``*bf16``, ``*fp32``, ``i32``.
            All pointers are 16-byte aligned; integers are not specialised.
        constexprs: values of the constant arguments.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        dtype: of the op's rows: ``bfloat16``, ``float16`` or ``float32``.
        op: configurations of the same op and dtype must have one matrix instruction and one order of sums.
        role: ``decode``, ``prefill``, ``training``, ``backward``, or ``any``.
    """

    name: str
    function: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    dtype: str = "bfloat16"
    op: str = ""
    role: str = "any"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """What a build says about itself.

    Attributes:
        shared_memory: bytes of one program.
        instructions: matrix instructions with their shapes, as PTX or AMDGCN spells them, in sorted order.
        spilled_bytes: stores and loads of spilled registers; None where the assembler does not say.
        registers: per thread.
        ttgir: Triton's GPU intermediate text, from which layouts and shapes are read.
        assembly: PTX or AMDGCN text.
    """

    shared_memory: int
    instructions: tuple[str, ...]
    spilled_bytes: int | None
    registers: int | None
    ttgir: str
    assembly: str


def configs(target: Target) -> Iterator[KernelConfig]:
    """Yield every kernel in every configuration that a run on ``target`` may launch."""
    import zerogap.ops.triton as package

    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if module.__name__ == __name__:
            continue
        if hasattr(module, "configs"):
            yield from module.configs(target)
        else:
            yield from getattr(module, "KERNELS", ())


def compile_options(config: KernelConfig, target: Target) -> dict[str, Any]:
    """Return all options of a build or a launch."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **pinned(target), **config.options}


def build(config: KernelConfig, target: Target) -> Built:
    """Compile a kernel for an architecture; no GPU is needed."""
    import triton
    from triton.compiler import ASTSource

    names = config.function.arg_names
    missing = set(names) ^ (set(config.signature) | set(config.constexprs))
    assert not missing, f"{config.name}: signature and constants do not match the kernel's arguments: {missing}"
    signature = {name: config.signature.get(name, "constexpr") for name in names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(config.function, signature, config.constexprs, attributes)
    compiled = triton.compile(source, target=target.gpu_target(), options=compile_options(config, target))
    assembly = compiled.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    spilled, registers = _resources(assembly, target)
    return Built(
        compiled.metadata.shared,
        _instructions(assembly),
        spilled,
        registers,
        compiled.asm["ttgir"],
        assembly,
    )


_INSTRUCTION = re.compile(r"\b(mma\.sync[\w.]*|wgmma\.mma_async[\w.]*|tcgen05\.mma[\w.:]*|v_mfma_\w+)")


def _instructions(assembly: str) -> tuple[str, ...]:
    return tuple(sorted(set(_INSTRUCTION.findall(assembly))))


def _resources(assembly: str, target: Target) -> tuple[int | None, int | None]:
    """Return spilled bytes and registers as the assembler reports them."""
    if target.backend == "hip":
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
        registers = re.search(r"\.vgpr_count:\s*(\d+)", assembly)
        return (4 * int(spills[1]) if spills else None), (int(registers[1]) if registers else None)
    from triton import knobs

    assert isinstance(target.arch, int)
    tool = knobs.nvidia.ptxas_blackwell if target.arch >= 100 else knobs.nvidia.ptxas
    suffix = "a" if target.arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(assembly)
        command = [tool.path, "-v", "--fmad=false", f"--gpu-name={target.name}{suffix}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    return sum(int(stores) + int(loads) for stores, loads in spills), (int(registers[1]) if registers else None)
