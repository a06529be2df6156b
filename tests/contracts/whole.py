"""For each contract, whole sets of facts that meet it, so that one can be taken away at a time."""

from __future__ import annotations

from typing import Any

from zerogap.facts.fact import Fact, Facts, convert

_NAME = "qwen3_dense_true_on_policy_v1"

_MODEL = {
    "model.name": "Qwen3-4B",
    "model.path": "Qwen/Qwen3-4B",
    "model.family": "qwen3",
    "model.kind": "dense",
    "model.attention": ["gqa"],
    "model.dtype": "bfloat16",
    "model.quantization": "none",
}


def _gpu(name: str, capability: str) -> dict[str, Any]:
    return {
        f"gpu.{role}.{field}": value
        for role in ("engine", "trainer")
        for field, value in (("vendor", "nvidia"), ("name", name), ("capability", capability), ("gfx", "absent"))
    }


_ENGINE = {
    "launch.given": True,
    "engine.attention_backend": "fa3",
    "engine.prefill_attention_backend": "unset",
    "engine.decode_attention_backend": "unset",
    "engine.deterministic": True,
    "engine.prefill_only_deterministic": False,
    "engine.dtype": "auto",
    "engine.kv_cache_dtype": "auto",
    "engine.quantization": "none",
    "engine.speculative": "none",
    "engine.prefix_cache": True,
    "engine.tp": 1,
    "engine.pp": 1,
    "engine.ep": 1,
}
_MILES_SOFTWARE = {
    "software.torch": "2.11.0+cu130",
    "software.torch_cuda": "13.0",
    "software.miles": "0.0.2",
    "software.sglang": "0.5.17",
    "software.sglang_true_on_policy": True,
    "software.sgl_kernel": "0.4.4",
    "software.sgl_kernel_fa3": True,
    "software.sgl_kernel_fa3_cubins": ["sm_80", "sm_90a"],
    "software.flash_attn_3": "3.0.0",
    "software.transformers": "5.3.0",
    "software.deep_gemm": "2.1.0",
    "software.megatron_true_on_policy": True,
}
_MILES_LAUNCH = {
    **_ENGINE,
    "launch.framework": "miles",
    "engine.kind": "sglang",
    "engine.contract": _NAME,
    "engine.rl_on_policy_target": "none",
    "eval_engine.attention_backend": "fa3",
    "trainer.true_on_policy": True,
    "trainer.attention": "flash_attention_3",
    "trainer.dtype": "bfloat16",
    "trainer.use_rollout_logprobs": False,
    "trainer.skip_actor_forward": False,
    "trainer.recompute_via_prefill": True,
    "trainer.fully_async": False,
    "trainer.session_server": "none",
    "trainer.tp": 1,
    "trainer.pp": 1,
    "trainer.cp": 1,
    "trainer.ep": 1,
    "trainer.cp_comm_type": "unset",
    "trainer.sequence_parallel": False,
    "trainer.lora": False,
    "trainer.backend": "fsdp",
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": -1,
    "env.CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "env.NCCL_ALGO": "Ring",
    "env.SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
}
_MEGATRON = {
    "trainer.backend": "megatron",
    "trainer.contract": _NAME,
    "trainer.deterministic": True,
    "trainer.transformer_impl": "local",
    "trainer.cpu_initialization": True,
    "trainer.batch_invariant": True,
    "trainer.swiglu_fusion": False,
    "trainer.rope_fusion": False,
    "trainer.cp": 4,
    "trainer.cp_comm_type": "a2a",
    "env.NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
_MILES = {**_gpu("H200", "9.0"), **_MODEL, **_MILES_SOFTWARE, **_MILES_LAUNCH}
_SGLANG = {
    **_gpu("B200", "10.0"),
    **_MODEL,
    **_MILES_SOFTWARE,
    **_ENGINE,
    "launch.framework": "sglang",
    "engine.kind": "sglang",
    "eval_engine.attention_backend": "unset",
    "engine.attention_backend": "triton",
}
_VLLM = {
    **_gpu("H100", "9.0"),
    **_MODEL,
    **_ENGINE,
    "software.vllm": "0.32.0",
    "software.torch": "2.11.0+cu130",
    "software.torch_cuda": "13.0",
    "engine.kind": "vllm",
    "engine.attention_backend": "FLASH_ATTN",
    "engine.sequence_parallel": False,
    "engine.async_tp": False,
    "engine.fuse_allreduce_rms": False,
    "engine.tp": 2,
}

WHOLE: dict[str, list[dict[str, Any]]] = {
    "miles/qwen3-dense-v1": [
        _MILES,
        {**_MILES, **_MEGATRON},
        {**_MILES, "trainer.recompute_via_prefill": False},
        {
            name: value
            for name, value in _MILES.items()
            if not name.startswith(("engine.", "trainer.", "rollout.", "launch."))
        }
        | {"launch.given": False},
    ],
    "sglang/deterministic-inference": [
        _SGLANG,
        {**_SGLANG, "engine.attention_backend": "fa4", "engine.kv_cache_dtype": "fp8_e4m3"},
        {
            **_SGLANG,
            **_gpu("H100", "9.0"),
            "engine.attention_backend": "fa3",
            "engine.tp": 4,
            "env.NCCL_MAX_NCHANNELS": "8",
            "env.NCCL_MIN_NCHANNELS": "8",
        },
        {
            **_SGLANG,
            **_gpu("H100", "9.0"),
            "engine.attention_backend": "fa3",
            "model.family": "deepseek_v3",
            "model.attention": ["mla"],
        },
    ],
    "vllm/batch-invariant": [_VLLM],
    "torchtitan/bitwise": [
        {
            **_gpu("H100", "9.0"),
            **_MODEL,
            "launch.given": True,
            "launch.framework": "torchtitan",
            "software.torchtitan": "0.3.0",
            "software.vllm": "0.32.0",
            "software.torch_cuda": "13.0",
            "trainer.tp": 2,
            "engine.tp": 2,
            "engine.deterministic": True,
            "trainer.sequence_parallel": False,
            "engine.sequence_parallel": False,
        },
    ],
    "slime/topp-replay": [
        {
            **_gpu("H100", "9.0"),
            "launch.given": True,
            "launch.framework": "slime",
            "software.slime": "0.2",
            "software.sglang": "0.5.10",
            "software.slime_topp_patch": True,
            "rollout.top_k": -1,
            "rollout.top_p": 0.9,
        },
    ],
    "zerogap/exact": [
        {
            **_MODEL,
            "host.os": "Linux",
            "software.python": "3.11.7",
            "software.torch": "2.13.0",
            "zerogap.backend": "cpu-portable",
            "launch.given": True,
            "launch.framework": "zerogap",
            "certificate.holds": True,
        },
        {
            **_MODEL,
            "host.os": "Linux",
            "software.python": "3.11.7",
            "software.torch": "2.13.0",
            "zerogap.backend": "gpu-triton",
            "gpu.engine.name": "NVIDIA GB10",
            "gpu.engine.capability": "12.1",
            "gpu.engine.gfx": "absent",
            "launch.given": True,
            "launch.framework": "zerogap",
            "certificate.holds": True,
        },
    ],
}

# Requirements that no set of WHOLE can meet together with the rest of their contract: facts that meet them alone.
ALONE: dict[str, dict[str, Any]] = {
    "fa-on-this-gpu": {**_SGLANG, "engine.attention_backend": "fa"},
    "trtllm-on-this-gpu": {**_SGLANG, "engine.attention_backend": "trtllm_mha"},
    "hybrid-on-blackwell": {**_SGLANG, "model.attention": ["gqa", "linear"]},
}


def facts_of(values: dict[str, Any]) -> Facts:
    """Return facts with these values."""
    return Facts({name: Fact(convert(name, value, "test"), "test") for name, value in values.items()})
