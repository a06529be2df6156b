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
        stack: bytes of a thread's stack frame, where spilled registers go: with 0 nothing was spilled anywhere.
        hot_spills: accesses to spilled registers in the innermost loops that multiply; on AMD in the whole kernel. None
            if there is a stack frame and Triton's disassembler does not know the architecture: loops were not read.
        ttgir: Triton's GPU intermediate text, from which layouts and shapes are read.
        assembly: PTX or AMDGCN text.
    """

    shared_memory: int
    instructions: tuple[str, ...]
    stack: int
    hot_spills: int | None
    ttgir: str
    assembly: str


def configs(target: Target) -> Iterator[KernelConfig]:
    """Yield every kernel in every configuration that a run on ``target`` may launch."""
    package = importlib.import_module(__name__.rpartition(".")[0])  # whose modules import this one
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
    if target.backend == "cuda":
        stack = _stack(compiled.asm["cubin"])
        spills = _sass_spills(compiled) if stack else 0
    else:
        stack = int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", assembly)[1])  # type: ignore[index]
        spills = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)[1])  # type: ignore[index]
    return Built(compiled.metadata.shared, _instructions(assembly), stack, spills, compiled.asm["ttgir"], assembly)


def _stack(cubin: bytes) -> int:
    """Return the bytes of stack that a CUDA binary states for its kernel, whatever its architecture."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(int(match[1]) + int(match[2]) for match in re.finditer(r"\bSTACK:(\d+).*?\bLOCAL:(\d+)", usage))


def _sass_spills(compiled: Any) -> int | None:
    try:
        return _hot_spills(compiled.asm["sass"])
    except subprocess.CalledProcessError:  # the disassembler of CUDA 12.8 knows neither sm_103 nor sm_121
        return None


_INSTRUCTION = re.compile(r"\b(mma\.sync[\w.]*|wgmma\.mma_async[\w.]*|tcgen05\.mma[\w.:]*|v_mfma_\w+)")


def _instructions(assembly: str) -> tuple[str, ...]:
    return tuple(sorted(set(_INSTRUCTION.findall(assembly))))


_MATRIX = re.compile(r"\b(HMMA|HGMMA|UTCHMMA|UTC\w*MMA|FFMA|FMUL)\b")
_SPILL = re.compile(r"\b(LDL|STL)\b")


def _hot_spills(sass: str) -> int:
    """Count accesses to spilled registers in the innermost loops that multiply matrices.

    Args:
        sass: Triton's listing: one instruction of 16 bytes a line. It writes targets of some branches as labels, of
            others (those with a uniform predicate) as addresses.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in sass.splitlines():
        if match := re.match(r"\s*(\.?L\w+):", line):
            labels[match[1]] = len(lines)
        elif line.strip() and not line.startswith("Function:"):
            lines.append(line)
    goals = [_branch_goal(line, labels) for line in lines]
    loops = [(goal, i) for i, goal in enumerate(goals) if goal is not None and goal < i]
    loops = [loop for loop in loops if not _reaches(lines, goals, *loop)]
    hot = [loop for loop in loops if _MATRIX.search("\n".join(lines[loop[0] : loop[1]]))]
    inner = [(a, b) for a, b in hot if not any((a, b) != (c, d) and a <= c and d <= b for c, d in hot)]
    return sum(bool(_SPILL.search(line)) for a, b in inner for line in lines[a:b])


def _branch_goal(line: str, labels: dict[str, int]) -> int | None:
    match = re.search(r"\bBRA\b[^;]*?(?:\b0x([0-9a-f]+)|(\.?\bL_?\w+))", line)
    if not match:
        return None
    return int(match[1], 16) // 16 if match[1] else labels.get(match[2])


_LEAVES = re.compile(r"(?:^|\s)(?:BRA (?:0x|\.?L)|EXIT\b|RET\b)")


def _reaches(lines: list[str], goals: list[int | None], head: int, end: int) -> bool:
    """Say whether ``end`` runs without ``head``: then a branch back from it is code laid out far off, and no loop."""
    seen, todo = {head}, [0]
    while todo:
        i = todo.pop()
        if i in seen or i >= len(lines):
            continue
        if i == end:
            return True
        seen.add(i)
        if (goal := goals[i]) is not None:
            todo.append(goal)
        if "@" in lines[i] or not _LEAVES.search(lines[i]):
            todo.append(i + 1)
    return False
