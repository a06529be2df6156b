"""Every kernel is built for every architecture without a GPU, and what the compiler made of it is read.

Decode, prefill and training variants of an op must use one matrix instruction of one shape and one order of K: what
keeps the row law on a GPU is that they are the same arithmetic. The short form builds the variants of some ops; the
full matrix (about an hour of one core) is marked slow.
"""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'zerogap[gpu]'")

from zerogap.ops.triton import aot
from zerogap.ops.triton.aot import Built, KernelConfig
from zerogap.ops.triton.targets import TARGETS, Target

HALF = {
    "mma": r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.\w+\.\w+\.f32",
    "wgmma": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.\w+\.\w+",
    "tcgen05": r"tcgen05\.mma\.cta_group::1\.kind::f16",
    "mfma": r"v_mfma_f32_16x16x(16|32)_b?f16",
}
# The disassembler of Triton 3.6 knows neither of the first: their binaries state the size of a stack frame, and if
# there is one, loops are read from the sibling, of the same tiles and instructions, whose frame must be as large.
SIBLINGS = {"sm_103": "sm_100", "sm_121": "sm_120"}
SHORT = [
    ("sm_80", "linear 2560x4096/8", "bfloat16"),
    ("sm_90", "linear 2560x4096/8", "bfloat16"),
    ("sm_120", "linear 1024x2560/1", "float16"),
    ("sm_100", "linear 1024x2560/1", "bfloat16"),
    ("gfx942", "linear 2560x4096/8", "bfloat16"),
    ("gfx950", "attention 128x4", "bfloat16"),
    ("sm_90", "attention 64x3", "bfloat16"),
    ("sm_89", "linear combine", "float32"),
    ("sm_90", "silu_mul", "bfloat16"),
    ("sm_120", "column sums", "float32"),
    ("sm_120", "distribution draw", "float32"),
    ("gfx942", "kept set last", "float32"),
    ("gfx950", "uniform", "float64"),
]


def groups(target: Target) -> dict[tuple[str, str], list[KernelConfig]]:
    found = defaultdict(list)
    for config in aot.configs(target):
        found[config.op, config.dtype].append(config)
    return dict(found)


def shapes(built: Built) -> set[str]:
    """Shapes of the matrix instructions, and of the accumulators of tcgen05, which lie in tensor memory."""
    text = built.ttgir
    return {*re.findall(r"instrShape = \[[\d, ]+\]", text), *re.findall(r"tensor_memory_encoding<[^>]*>", text)}


def orders(built: Built) -> set[tuple[str, ...]]:
    """K and types of each product of tiles: [M, K] x [K, N]."""
    found = set()
    for line in built.ttgir.splitlines():
        if re.search(r"= (tt\.dot|ttng\.warp_group_dot)\b|ttng\.tc_gen5_mma\b", line):
            tiles = re.findall(r"<(\d+)x(\d+)x(bf16|f16|f32)\b", line.split(" : ")[-1])
            (_, k, left), (inner, _, right) = tiles[0], tiles[1]
            assert k == inner, line
            found.add((k, left, right))
    return found


def chained_sums(ttgir: str) -> list[str]:
    """Return the sums of floats over more than two terms: their order is the compiler's choice, not the kernel's."""
    found = []
    reductions = r'"tt\.reduce"\([^)]*\) <\{axis = (\d+)[^}]*\}> \(\{(.*?)\}\) : \(tensor<([\dx]+)x\w+'
    for axis, body, shape in re.findall(reductions, ttgir, re.DOTALL):
        if "arith.addf" in body and int(shape.split("x")[int(axis)]) > 2:
            found.append(f"{shape} over axis {axis}")
    return found


def spilled(config: KernelConfig, one: Built, target: Target) -> int:
    """Count accesses to spilled registers in hot loops, of the architecture's sibling where its own cannot be read."""
    if one.hot_spills is not None:
        return one.hot_spills
    sibling = TARGETS[SIBLINGS[target.name]]
    near = aot.build(next(c for c in aot.configs(sibling) if c.name == config.name), sibling)
    assert near.hot_spills is not None, f"{config.name}: loops of {sibling.name} were not read either"
    assert one.stack <= near.stack, f"{config.name}: {one.stack} bytes of stack, {near.stack} on {sibling.name}"
    return near.hot_spills


def check(target: Target, configs: list[KernelConfig]) -> None:
    built = {config.name: aot.build(config, target) for config in configs}
    for config in configs:
        one = built[config.name]
        assert one.shared_memory <= target.shared_memory, f"{config.name}: {one.shared_memory} bytes"
        assert not re.search(r"\b(atom|red)\.(global|shared)|_atomic_", one.assembly), f"{config.name}: an atomic"
        assert not any("tf32" in name or "xf32" in name for name in one.instructions), config.name
        assert not chained_sums(one.ttgir), f"{config.name}: {chained_sums(one.ttgir)}"
        if config.role == "backward":
            continue
        spills = spilled(config, one, target)
        assert spills == 0, f"{config.name}: {spills} accesses to spilled registers in a hot loop"
        if orders(one) and config.dtype != "float32":
            assert one.instructions, f"{config.name}: products without a matrix instruction"
            for instruction in one.instructions:
                assert re.fullmatch(HALF[target.instruction], instruction), f"{config.name}: {instruction}"
        elif not orders(one) and "math.fma" not in one.ttgir:  # where the kernel states none, the compiler makes none
            assert not re.search(r"\bfma\.rn\.f32", one.assembly), f"{config.name}: a fused multiply-add"
    variants = [config.name for config in configs if config.role in ("decode", "prefill", "training")]
    for what in (shapes, orders, lambda one: one.instructions):
        seen = {name: what(built[name]) for name in variants}
        assert all(value == seen[variants[0]] for value in seen.values()), f"{target.name}: {seen}"


@pytest.mark.parametrize(("name", "op", "dtype"), SHORT)
def test_variants_are_the_same_arithmetic(name: str, op: str, dtype: str) -> None:
    check(TARGETS[name], groups(TARGETS[name])[op, dtype])


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_whole_matrix(name: str) -> None:
    for configs in groups(TARGETS[name]).values():
        check(TARGETS[name], configs)


@pytest.mark.parametrize("name", TARGETS)
def test_names_are_unique(name: str) -> None:
    names = [config.name for config in aot.configs(TARGETS[name])]
    assert len(set(names)) == len(names)


def test_the_check_finds_another_instruction() -> None:
    """On Hopper 16 rows compile to mma.sync and 64 to wgmma: a table with such a decode tile must fail."""
    target = TARGETS["sm_90"]
    decode, prefill = (c for c in groups(target)["linear 1024x2560/1", "bfloat16"] if not c.constexprs["HAS_BIAS"])
    small = KernelConfig(**{**vars(decode), "constexprs": {**decode.constexprs, "BLOCK_M": 16}})
    with pytest.raises(AssertionError, match=r"mma\.sync"):
        check(target, [small, prefill])


def test_sums_whose_order_the_compiler_chooses_are_found() -> None:
    reduction = """
        %t = "tt.reduce"(%x) <{axis = 1 : i32}> ({
        ^bb0(%a: f32, %b: f32):
          %c = arith.OP %a, %b : f32
          tt.reduce.return %c : f32
        }) : (tensor<64xNxf32, #mma>) -> tensor<64xf32, #ttg.slice<{dim = 1, parent = #mma}>>
    """
    chain = reduction.replace("OP", "addf").replace("N", "32")
    assert chained_sums(chain) == ["64x32 over axis 1"]
    assert not chained_sums(chain.replace("addf", "maxnumf") + reduction.replace("OP", "addf").replace("N", "2"))


def test_spills_in_hot_loops_are_found() -> None:
    sass = """
        LBB0:
          LDG R1, [R2];
          HMMA.16816.F32.BF16 R4, R8, R12, R4;
          STL [R1], R5;
          @P0 BRA LBB0;
          STL [R1+0x4], R6;
        LBB1:
          LDL R5, [R1];
          @P0 BRA LBB1;
    """
    assert aot._hot_spills(sass) == 1, "neither after the loop nor in a loop without products"
    inner = "LDG R1;\nSTL [R1], R2;\nHMMA R4;\nBRA.U UP6, 0x20;\nSTL [R1], R3;\nBRA 0x10;\n"
    assert aot._hot_spills(inner) == 0, "a target that is an address ends at the inner loop"
    assert aot._hot_spills(inner.replace("0x20", "0x10")) == 1
    away = "@P0 BRA 0x40;\nHMMA R4;\nSTL [R1], R3;\nEXIT;\nNOP;\nBRA 0x10;\n"
    assert aot._hot_spills(away) == 0, "a wait laid out at the end is no loop"
