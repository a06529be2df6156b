"""Every report of the areas `check` and `check+probe` as a test with the answer that was wanted.

A case gives the facts of the report (what the user's machine, launch, log or measurement said) and the fault or
requirement that must speak, with what must be in its text. ``OUT_OF_REACH`` lists what a static check cannot do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerogap import check
from zerogap.contracts.report import Report
from zerogap.contracts.rules import Verdict
from zerogap.facts import runlog
from zerogap.facts.fact import show

MILES, SGLANG, VLLM = "miles/qwen3-dense-v1", "sglang/deterministic-inference", "vllm/batch-invariant"

# Parts of a report's wish that belong to another verb, with the reason. No whole case is out of reach.
OUT_OF_REACH = {
    "R070": "sending the first request is `zerogap probe`'s; check judges what it did (probe.first_request)",
    "R085": "measuring the perplexity of a fixed text is `zerogap probe`'s; check judges the two numbers",
    "R107": "posting two seeds to each endpoint is `zerogap probe`'s; check judges which endpoints ignored them",
    "R110": "sweeping a neighbour's length is `zerogap probe`'s; check judges if the row stayed equal",
    "R112": "comparing decode with prefill at two tensor-parallel degrees is `zerogap probe`'s; check attributes it",
    "R113": "repeating runs at two tensor-parallel degrees is `zerogap probe`'s; check lists the suspects",
    "R117": "running the float32 product is `zerogap probe`'s; check judges whether it was exact",
    "R118": "counting NaN log-probs is `zerogap probe`'s; check judges the two shares, and the version by itself",
    "R119": "comparing batch sizes is `zerogap probe`'s; check knows the model and judges the comparison",
}

# case -> options of check, the finding that must be there, its status, and what its text must name
CASES: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    "R068": (
        {"gpu": "RTX 4080 SUPER", "assume": ["software.sgl_kernel_fa3_cubins=sm_80,sm_90a"], "contracts": MILES},
        "FA3_NO_CUBIN",
        "no",
        ("sm_80, sm_90a", "8.9", "claim"),
    ),
    "R069": (
        {
            "gpu": "B300",
            "assume": [
                "software.sglang=0.5.17",
                "model.attention=gqa,linear",
                "model.kind=hybrid",
                "engine.kind=sglang",
                "engine.attention_backend=flashinfer",
                "engine.deterministic=1",
            ],
            "contracts": SGLANG,
        },
        "hybrid-on-blackwell",
        "no",
        ("trtllm_mha", "triton", "fa4", "--attention-backend triton"),
    ),
    "R070": (
        {
            "gpu": "RTX 5090",
            "assume": ["probe.first_request=crashed", "log.errors=NO_KERNEL_IMAGE", "engine.kind=sglang"],
            "contracts": SGLANG,
        },
        "ENGINE_CRASHED_ON_FIRST_REQUEST",
        "no",
        ("NO_KERNEL_IMAGE", "12.0"),
    ),
    "R071": (
        {"gpu": "B200", "model": "Qwen3-4B", "contracts": MILES},
        "engine-gpu",
        "no",
        ("FlashAttention 3", "10.0", "8.0 to 9.0", "not possible"),
    ),
    "R072": (
        {"gpu": "A100", "assume": ["software.flash_attn_3=3.0.0b1"], "contracts": MILES},
        "OLD_FA3_BUILD",
        "no",
        ("3.0.0b1", "Hopper only", "8.0"),
    ),
    "R074": (
        {
            "gpu": "RTX 5090",
            "assume": [
                "engine.kind=sglang",
                "engine.attention_backend=fa3",
                "engine.kv_cache_dtype=fp8_e5m2",
                "engine.deterministic=1",
            ],
            "contracts": SGLANG,
        },
        "fp8-kv-cache",
        "no",
        ("fa3", "fp8_e5m2", "12.0", "--attention-backend flashinfer"),
    ),
    "R075": (
        {
            "gpu": "GB10",
            "assume": [
                "software.torch=2.12.1+cu130",
                "software.sgl_kernel=0.4.4+cu130",
                "software.sgl_kernel_cubins=sm_121a",
            ],
            "contracts": SGLANG,
        },
        "LIBTORCH_ABI_MISMATCH",
        "no",
        ("2.11.0", "2.12.1+cu130", "undefined c10 symbol", "architecture"),
    ),
    "R076": (
        {
            "gpu": "A10",
            "assume": [
                "software.missing_libraries=libnvrtc.so.12<-sgl_kernel/common_ops.abi3.so",
                "software.libraries=libnvrtc.so.13",
            ],
            "contracts": SGLANG,
        },
        "CUDA_MAJOR_MISMATCH",
        "no",
        ("libnvrtc.so.12", "libnvrtc.so.13", "nvidia-cuda-nvrtc-cu12"),
    ),
    "R077": (
        {
            "gpu": "sm_121",
            "assume": ["software.sgl_kernel_cubins=sm_100a,sm_120a", "software.sgl_kernel_ptx=[]"],
            "contracts": SGLANG,
        },
        "NO_KERNEL_IMAGE",
        "no",
        ("sm_100a, sm_120a", "12.1", "+cu130"),
    ),
    "R085": (
        {
            "gpu": "sm_121",
            "assume": ["engine.moe_backend=cutlass_fp4", "probe.perplexity=4.1e4", "probe.reference_perplexity=7.9"],
            "contracts": VLLM,
        },
        "SILENT_GARBAGE",
        "no",
        ("41000", "7.9"),
    ),
    "R106": (
        {
            "gpu": "H100",
            "assume": ["engine.deterministic=1", "rollout.temperature=0.95", "rollout.seed=none", "engine.kind=sglang"],
        },
        "DETERMINISTIC_WITHOUT_SEED",
        "warn",
        ("0.95", "seed", "equal log-probs"),
    ),
    "R107": (
        {"gpu": "H100", "assume": ["probe.seed_ignored=/v1/completions"]},
        "SEED_IGNORED",
        "warn",
        ("/v1/completions", "/generate"),
    ),
    "R108": (
        {
            "gpu": "B200",
            "model": "gemma-4-31b-it",
            "assume": ["engine.kind=sglang", "engine.deterministic=1", "engine.attention_backend=unset"],
            "contracts": SGLANG,
        },
        "attention",
        "no",
        ("trtllm_mha", "model override", "nobody asked", "--attention-backend triton"),
    ),
    "R110": (
        {"gpu": "H100", "assume": ["probe.neighbour_equal=false", "software.vllm=0.25.1"], "contracts": VLLM},
        "NOT_BATCH_INVARIANT",
        "no",
        ("neighbour",),
    ),
    "R112": (
        {
            "gpu": "H100",
            "assume": [
                "engine.tp=4",
                "engine.kind=sglang",
                "probe.prefill_decode_gap_tp1=0.0",
                "probe.prefill_decode_gap=0.151",
            ],
            "contracts": SGLANG,
        },
        "ALLREDUCE_ORDER",
        "no",
        ("0.151", "NCCL_MAX_NCHANNELS"),
    ),
    "R113": (
        {
            "gpu": "H100",
            "assume": [
                "engine.tp=2",
                "engine.kind=vllm",
                "probe.repeat_equal_tp1=1.0",
                "probe.repeat_equal=0.3",
                "engine.fuse_allreduce_rms=true",
                "software.vllm=0.26",
            ],
            "contracts": VLLM,
        },
        "TP_NOT_REPEATABLE",
        "no",
        (
            "fuse_allreduce_rms",
            "custom_ar_size",
            "enable_sp",
            "moe_combine",
            "in this order: pass_config.fuse_allreduce_rms=false",
        ),
    ),
    "R114": (
        {
            "gpu": "H100",
            "launch": [
                "env",
                "VLLM_BATCH_INVARIANT=1",
                "vllm",
                "serve",
                "Qwen/Qwen3-8B",
                "-tp",
                "4",
                "--compilation-config",
                '{"pass_config": {"enable_sp": true}}',
            ],
        },
        "SP_WITH_BATCH_INVARIANT",
        "no",
        ("enable_sp", "sequence parallelism"),
    ),
    "R117": (
        {"gpu": "H100", "assume": ["probe.fp32_matmul_exact=false"], "contracts": VLLM},
        "BI_FP32_USES_TF32",
        "no",
        ("TF32", "new gap"),
    ),
    "R118": (
        {
            "gpu": "H100",
            "assume": [
                "software.sglang=0.5.3",
                "engine.deterministic=1",
                "probe.nan_ratio=0.4",
                "probe.nan_ratio_off=0",
            ],
            "contracts": SGLANG,
        },
        "BI_KERNEL_BUG",
        "no",
        ("0.5.3", "persistent matrix product"),
    ),
    "R119": (
        {
            "gpu": "H100",
            "model": "gpt-oss-120b",
            "assume": ["engine.kind=sglang", "engine.deterministic=1", "engine.tp=2", "probe.batch_equal=false"],
            "contracts": SGLANG,
        },
        "KNOWN_BAD",
        "no",
        ("gpt-oss-120b", "batch"),
    ),
    "R123": (
        {"gpu": "GB200", "model": "nemotron-h-8b", "contracts": MILES},
        "MAMBA_PREFILL_DECODE_KERNELS",
        "no",
        ("not possible", "chunked scan", "recurrent"),
    ),
}

# The same kind of fault on another machine or with other values: the rule must hold for the kind, not for the case.
ALIKE: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "R068 on 8.6",
        {"gpu": "RTX 3090", "assume": ["software.sgl_kernel_fa3_cubins=sm_80,sm_90a"]},
        "FA3_NO_CUBIN",
        "no",
    ),
    ("R068 on 12.0", {"gpu": "RTX 5090", "assume": ["software.sgl_kernel_fa3_cubins=sm_90a"]}, "FA3_NO_CUBIN", "no"),
    ("R068 but 9.0", {"gpu": "H100", "assume": ["software.sgl_kernel_fa3_cubins=sm_80,sm_90a"]}, "FA3_NO_CUBIN", ""),
    ("R068 but 8.0", {"gpu": "A100", "assume": ["software.sgl_kernel_fa3_cubins=sm_80,sm_90a"]}, "FA3_NO_CUBIN", ""),
    ("R072 on Ada", {"gpu": "L40S", "assume": ["software.flash_attn_3=3.0.0b1"]}, "OLD_FA3_BUILD", "no"),
    ("R072 but Hopper", {"gpu": "H100", "assume": ["software.flash_attn_3=3.0.0b1"]}, "OLD_FA3_BUILD", ""),
    ("R072 but new", {"gpu": "A100", "assume": ["software.flash_attn_3=3.0.0"]}, "OLD_FA3_BUILD", ""),
    (
        "R075 by metadata",
        {"gpu": "H100", "assume": ["software.torch=2.9.1+cu128", "software.sgl_kernel_needs_torch===2.8.0"]},
        "LIBTORCH_ABI_MISMATCH",
        "no",
    ),
    (
        "R075 but equal",
        {"gpu": "H100", "assume": ["software.torch=2.11.0+cu130", "software.sgl_kernel=0.4.4"]},
        "LIBTORCH_ABI_MISMATCH",
        "",
    ),
    (
        "R076 libcudart",
        {
            "gpu": "A10",
            "assume": [
                "software.missing_libraries=libcudart.so.13<-vllm/_C.abi3.so",
                "software.libraries=libcudart.so.12",
            ],
        },
        "CUDA_MAJOR_MISMATCH",
        "no",
    ),
    (
        "R076 libcudnn",
        {"gpu": "A10", "assume": ["software.missing_libraries=libcudnn.so.9<-vllm/_C.abi3.so"]},
        "MISSING_LIBRARY",
        "no",
    ),
    (
        "R077 on B300",
        {"gpu": "B300", "assume": ["software.sgl_kernel_cubins=sm_100a,sm_120a", "software.sgl_kernel_ptx=[]"]},
        "NO_KERNEL_IMAGE",
        "no",
    ),
    (
        "R077 but family",
        {"gpu": "sm_121", "assume": ["software.sgl_kernel_cubins=sm_120", "software.sgl_kernel_ptx=[]"]},
        "NO_KERNEL_IMAGE",
        "",
    ),
    (
        "R077 but PTX",
        {"gpu": "sm_121", "assume": ["software.sgl_kernel_cubins=sm_90a", "software.sgl_kernel_ptx=sm_90"]},
        "NO_KERNEL_IMAGE",
        "",
    ),
    (
        "R085 near",
        {"gpu": "sm_121", "assume": ["probe.perplexity=8.1", "probe.reference_perplexity=7.9"]},
        "SILENT_GARBAGE",
        "",
    ),
    (
        "R106 but seeded",
        {"gpu": "H100", "assume": ["engine.deterministic=1", "rollout.temperature=0.95", "rollout.seed=7"]},
        "DETERMINISTIC_WITHOUT_SEED",
        "",
    ),
    (
        "R106 but greedy",
        {"gpu": "H100", "assume": ["engine.deterministic=1", "rollout.temperature=0", "rollout.seed=none"]},
        "DETERMINISTIC_WITHOUT_SEED",
        "",
    ),
    (
        "R112 but TP1 too",
        {"gpu": "H100", "assume": ["engine.tp=4", "probe.prefill_decode_gap_tp1=0.1", "probe.prefill_decode_gap=0.15"]},
        "ALLREDUCE_ORDER",
        "",
    ),
    (
        "R113 but TP1 too",
        {"gpu": "H100", "assume": ["engine.tp=2", "probe.repeat_equal_tp1=0.9", "probe.repeat_equal=0.3"]},
        "TP_NOT_REPEATABLE",
        "",
    ),
    (
        "R118 new version, NaN seen",
        {"gpu": "H100", "assume": ["software.sglang=0.5.17", "probe.nan_ratio=0.1", "probe.nan_ratio_off=0"]},
        "BI_KERNEL_BUG_SEEN",
        "no",
    ),
    (
        "R118 new version",
        {"gpu": "H100", "assume": ["software.sglang=0.5.17", "engine.deterministic=1"]},
        "BI_KERNEL_BUG",
        "",
    ),
    (
        "R077 without word on PTX",
        {"gpu": "B300", "assume": ["software.sgl_kernel_cubins=sm_100a,sm_120a"]},
        "NO_KERNEL_IMAGE",
        "unknown",
    ),
    ("R123 falcon-h1", {"gpu": "H200", "model": "Falcon-H1-7B-Instruct"}, "MAMBA_PREFILL_DECODE_KERNELS", "no"),
    ("R123 GDN", {"gpu": "H200", "model": "Qwen3-Next-80B-A3B-Instruct"}, "LINEAR_PREFILL_DECODE_KERNELS", "no"),
    ("R123 but dense", {"gpu": "H200", "model": "Qwen3-4B"}, "MAMBA_PREFILL_DECODE_KERNELS", ""),
]


def _finding(report: Report, name: str) -> Any:
    every = [finding for item in report.judgements for finding in item.findings] + list(report.faults)
    return next((finding for finding in every if finding.id == name), None)


def _text(finding: Any) -> str:
    return " ".join((finding.what, finding.expected, finding.observed, finding.says, finding.hint, finding.prints))


def _status(finding: Any) -> str:
    return str(finding.to_json()["status"]) if finding else ""


@pytest.mark.parametrize("case", sorted(CASES))
def test_case(case: str) -> None:
    options, name, status, words = CASES[case]
    report = check(**options)
    finding = _finding(report, name)
    assert _status(finding) == status, f"{case}: {name} is not there"
    text = _text(finding)
    for word in words:
        assert word in text, f"{case}: {word!r} is not in {text!r}"
    if status == "no":
        assert report.exit_code == 1 or "contracts" not in options
    else:
        assert report.verdict is not Verdict.YES


@pytest.mark.parametrize(("title", "options", "name", "status"), ALIKE, ids=[row[0] for row in ALIKE])
def test_the_kind(title: str, options: dict[str, Any], name: str, status: str) -> None:
    assert _status(_finding(check(**options), name)) == status


def test_r071_offers_deterministic_inference_with_triton() -> None:
    report = check(gpu="B200", model="Qwen3-4B", contracts=MILES)
    offered = [offer for item in report.judgements for offer in item.offers if offer.verdict is not Verdict.NO]
    assert [offer.contract for offer in offered][:2] == ["zerogap/exact", SGLANG]
    assert "triton" in offered[1].says


def test_r068_from_the_log_line_alone() -> None:
    line = "CUDA error (_deps/repo-flash-attention-src/hopper/flash_fwd_launch_template.h:203): invalid argument"
    assert runlog.error_facts(line, "log")["log.errors"].value == ("FA3_LAUNCH_INVALID",)


LINES = {
    "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use x": "FA3_REFUSES_GPU",
    "RuntimeError: FlashAttention only supports Hopper GPUs or newer.": "FA3_REFUSES_GPU",
    "launch_template.h:166): no kernel image is available for execution on the device": "NO_KERNEL_IMAGE",
    "[sgl_kernel] CRITICAL: Could not load any common_ops library!": "COMMON_OPS",
    "ImportError: x.so: undefined symbol: c10::MessageLogger::stream[abi:cxx11]()": "UNDEFINED_C10",
    "ImportError: x.so: undefined symbol: _ZN3c1013MessageLoggerC1Ev": "UNDEFINED_C10",
    "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory": "MISSING_LIBRARY",
    "RMSNorm failed with error code no kernel image is available for execution on the device": "NO_KERNEL_IMAGE",
    "Only {'triton', 'fa4'} backends are supported on Blackwell GPUs for hybrid GDN models. Got x.": "GDN_BACKEND",
    "FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe": "FA4_FP8",
}


@pytest.mark.parametrize(("line", "code"), LINES.items(), ids=list(LINES.values()))
def test_error_lines_of_the_reports(line: str, code: str) -> None:
    assert code in runlog.error_facts(f"some line\n(Engine pid=7) {line}\n", "run.log")["log.errors"].value


def test_r075_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "[sgl_kernel] CRITICAL: Could not load any common_ops library!\n"
        "ImportError: common_ops.abi3.so: undefined symbol: c10::MessageLogger::stream[abi:cxx11]()\n"
    )
    report = check(gpu="GB10", against=log, contracts=SGLANG)
    assert _finding(report, "LIBTORCH_ABI_MISMATCH_IN_LOG") is not None
    assert _finding(report, "COMMON_OPS_NOT_LOADED") is None, "the cause is known, so the symptom does not speak"
    assert report.exit_code == 1


def test_r082_matrix_equals_the_golden_file() -> None:
    """Every backend on every capability, with faked facts: no GPU is needed to know it before the model is loaded."""
    golden = json.loads((Path(__file__).parent / "golden" / "backends.json").read_text())
    table: dict[str, dict[str, str]] = {}
    for capability in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"):
        for backend in ("fa", "fa3", "fa4", "triton", "flashinfer"):
            report = check(
                gpu=capability,
                assume=[
                    f"engine.attention_backend={backend}",
                    "engine.kind=sglang",
                    "engine.deterministic=1",
                    "model.kind=dense",
                    "model.attention=gqa",
                    "software.sgl_kernel_fa3=true",
                    "engine.kv_cache_dtype=auto",
                    "software.sgl_kernel_fa3_cubins=sm_80,sm_90a",
                ],
                contracts=SGLANG,
            )
            own = [
                finding
                for item in report.judgements
                for finding in item.findings
                if "on-this-gpu" in finding.id or finding.id == "fa3-kernel"
            ]
            verdicts = {finding.verdict for finding in own}
            table.setdefault(capability, {})[backend] = next(
                str(verdict) for verdict in (Verdict.NO, Verdict.UNKNOWN, Verdict.YES) if verdict in verdicts
            )
    assert table == golden


def test_every_report_of_the_two_areas_has_a_case() -> None:
    wanted = {
        f"R{number:03d}"
        for number in (
            68,
            69,
            70,
            71,
            72,
            74,
            75,
            76,
            77,
            82,
            85,
            106,
            107,
            108,
            110,
            112,
            113,
            114,
            117,
            118,
            119,
            123,
        )
    }
    assert wanted == set(CASES) | {"R082"}
    assert set(OUT_OF_REACH) <= wanted
    assert show(("a",)) == "a"
