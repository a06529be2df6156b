"""Writes docs/gpus.md from contracts, GPUs and certificates: ``python -m zerogap.contracts.gpus_page docs/gpus.md``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from zerogap.contracts.contract import Contract
from zerogap.contracts.rules import Verdict
from zerogap.contracts.schema import built_in, faults
from zerogap.contracts.verdict import judge, resolve
from zerogap.facts.certificate import certificates
from zerogap.facts.gpu import Gpu, compiled_architectures, known_gpus, planned_facts
from zerogap.files import write_text_atomic

OURS = "zerogap/exact"

_HEAD = """# GPUs

This page is written from the contract files, the table of known GPUs and the certificates that ship, by
`python -m zerogap.contracts.gpus_page docs/gpus.md`; a test keeps it up to date. It says what a GPU alone decides. A
run needs more than a GPU: `zerogap check --gpu NAME --model M` says what.

| status | meaning |
|---|---|
| **certified** DATE | `zerogap certify` ran there and every proof held; the certificate ships with the package |
| compiles | tests build our Triton kernels for this architecture, by default some configurations; none certified |
| CPU only | our kernels are not built for it; `zerogap/exact` holds on the CPU beside it |
| possible | no requirement of this contract speaks against the GPU; the rest of the launch decides |
| no: ID | the contract's requirement of this name cannot be met with this GPU |
| unknown | the contract's sources say nothing certain about it |

*Compiles* is not *holds*: a compiler that builds a kernel has computed nothing. Until it is certified, `zerogap check`
answers `zerogap/exact` on a GPU with *unknown*, and training compares every trained token itself in any case.
"""

_TAIL = """## Certify yours

```
zerogap certify --device cuda:0 --model M
```

It takes a few minutes, the first one for building the kernels, needs no network, and names the first op that breaks if
one does. Which kernels a model needs is found first, without launching any, so it says "building kernels: 12 of 58".
Triton keeps them in `~/.triton/cache` (`TRITON_CACHE_DIR`), under a key of the kernel's source and all that it calls,
Triton's version, compiler switches, argument types and architecture: each is built once, and `zerogap certify --quick`
or the start of a run leaves the cache warm for the next process.

The GPU is named by number, never guessed; AMD ones are `cuda:N` too. `M` is a folder, a hub name or
`builtin:tiny-qwen3`: a certificate speaks of the shapes of its model, of one GPU model, one dtype (`--dtype`, bfloat16
by default there), one zerogap, PyTorch, Triton, CUDA and driver, and of the tiles that were used. A difference in any
of these is another certificate. It lies in `~/.local/share/zerogap/certificates` (or where `--output` says), where
`zerogap check` finds it.

## Share it

Send the JSON file with a pull request that adds it to `src/zerogap/data/certificates/` and writes this page again. It
holds no names, paths or host names beside the model's: read it, it is one line of JSON. It is self-issued: the digest
guards against accidents, it is no signature. A certificate that says *does not hold* is as welcome, with the op that it
names: the row then says so.

`bench/gpu.sh` does all of it on a machine that one has for minutes: certificate, conformance tests, a training run and
the tables of speed, with partial results if it is cut short.

## What was checked without a GPU

The kernels are built ahead of time, and the tests read from the results the matrix instruction, shared memory, spills,
and that nothing was fused (`make test-triton`, some configurations; `make test-triton-all`, every one). Triton's
interpreter runs them on a CPU: that proves indexing, masks and the order of operations, not a GPU's bits.

| Triton | built and read so far |
|---|---|
| 3.6.0 | the whole matrix, ten architectures: bfloat16 (877 configurations), float16 (597), float32 (810) |
| 3.7.1, 3.8.0, 3.9.0 | bfloat16 whole, ten architectures; float16 and float32 in part |

No forward kernel reaches for spilled registers in a hot loop. Triton 3.6.0
cannot disassemble code for sm_103 and sm_121: where such a kernel has a stack frame, loops are read from sm_100 and
sm_120.

The engine's captured decode steps ([engine](engine.md)) were built and tested without a GPU too. A tape on the CPU that
holds on to tensors and not to values, as a graph does, replays them over the interpreted kernels with the bits of the
eager steps; and over tensors that have a device and no values, a step with its sampler reads nothing on the host and
copies nothing between devices. Capture by CUDA itself, its speed, and the memory plan of a run on a GPU await one.

| pinned | why |
|---|---|
| no floating-point fusion (`enable_fp_fusion=False`) | `a * b + c` rounds twice unless written `fma`; defaults differ |
| `exp`, `log`, `sigmoid` of our own | the fast ones differ by architecture; ours are polynomials of explicit `fma` |
| division and square root by IEEE (`div_rn`, `sqrt_rn`) | plain `/` is approximate |
| sums as a balanced tree, two halves at a time | addition commutes: no layout and no number of warps changes a bit |
| no TF32, subnormal numbers kept | both change bits silently |
| draws and the nucleus in whole quanta | integer sums are exact in any order |
| no chain of float sums left to the compiler | LLVM as Triton 3.8 ships it may reorder one, not always alike |
| switches of the environment | one that no launch overrides is refused (`DISABLE_LLVM_OPT` and others) |
| no atomics on floating-point numbers | their order varies: gradients are summed in two fixed stages |
"""


def gpus_page(folder: Path | None = None) -> str:
    """Return the page's text.

    Args:
        folder: where the certificates lie; None = those that ship.
    """
    issued = [record for _, record in certificates(folder or shipped_certificates())]
    contracts = sorted(built_in(), key=lambda contract: contract.name != OURS)
    titles = ["GPU", "architecture", *(f"`{contract.name}`" for contract in contracts)]
    rows = []
    for gpu in known_gpus():
        if gpu.vendor in ("nvidia", "amd"):
            rows.append([gpu.name, gpu.architecture or "", *(_status(gpu, contract, issued) for contract in contracts)])
    table = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join((_HEAD, "## GPU by contract", "", *table, "", _TAIL))


def shipped_certificates() -> Path:
    """Return the folder of the certificates that ship with the package; it need not exist."""
    return Path(str(files("zerogap") / "data" / "certificates"))


def _status(gpu: Gpu, contract: Contract, issued: Sequence[dict[str, Any]]) -> str:
    if contract.name == OURS:
        return _our_status(gpu, issued)
    found = judge(contract, resolve(planned_facts([gpu.name])), faults())
    # A launch is not given, so requirements of the GPU alone are those that are decided here.
    broken = [item.id for item in found.findings if item.verdict is Verdict.NO and item.level == "require"]
    if broken:
        return f"no: {broken[0]}"
    about = [item for item in found.findings if any(name.startswith("gpu.") for name in item.evidence)]
    return "possible" if any(item.verdict is Verdict.YES for item in about) else "unknown"


def _our_status(gpu: Gpu, issued: Sequence[dict[str, Any]]) -> str:
    for record in issued:  # newest first
        device = record.get("device", {})
        if device.get("kind") == "gpu" and _is(gpu, device):
            date = str(record.get("issued", ""))[:10]
            return f"**certified** {date}" if record.get("holds") is True else f"**does not hold** {date}"
    return "compiles" if gpu.architecture in compiled_architectures() else "CPU only"


def _is(gpu: Gpu, device: dict[str, Any]) -> bool:
    from zerogap.facts.gpu import find

    known = find(str(device.get("model", "")))
    return known is not None and known.name == gpu.name


if __name__ == "__main__":
    write_text_atomic(Path(sys.argv[1]), gpus_page())
