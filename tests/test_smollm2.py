"""The real SmolLM2-135M-Instruct (``make smollm2``): the oracle, the gap over two GRPO steps, the memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from zerogap.models.rows import PackedCache, Rows
from zerogap.models.tokenizer import load_tokenizer
from zerogap.models.weights import load_decoder

ROOT = Path(__file__).parents[1]
MODEL = Path(os.environ.get("ZEROGAP_SMOLLM2", ROOT / ".models" / "smollm2-135m-instruct"))
PROMPT = "The gap between the trainer and the rollout engine is zero because both of them"

pytestmark = [pytest.mark.model, pytest.mark.timeout(1500)]


@pytest.fixture(autouse=True, scope="module")
def model_is_there() -> None:
    assert (MODEL / "config.json").exists(), f"{MODEL} is missing: run make smollm2"


@pytest.fixture
def double_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes RMSNorm in float32 even in a float64 model; as an oracle it must not."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRMSNorm, "forward", forward)


def test_oracle(double_norms: None) -> None:
    tokens = load_tokenizer(MODEL).encode(PROMPT)

    def ours(dtype: torch.dtype) -> torch.Tensor:
        decoder = load_decoder(MODEL, dtype)
        with torch.inference_mode():
            return decoder.logits(decoder.hidden(Rows.packed([tokens]), PackedCache()))

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="sdpa")
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    exact = theirs(torch.float64)
    assert (ours(torch.float64) - exact).abs().max() < 1e-9
    ours_error = (ours(torch.float32) - exact).abs().max()
    assert ours_error <= 2 * (theirs(torch.float32) - exact).abs().max()


@pytest.mark.parametrize("sampler", [(), ("rollout.temperature=0.7", "rollout.top_p=0.9", "rollout.min_p=0.02")])
def test_two_grpo_steps(tmp_path: Path, sampler: tuple[str, ...]) -> None:
    """Eight prompts, four samples, 48 tokens: no token differs, peak resident memory under 6 GB."""
    command = [sys.executable, "-m", "zerogap", "train", str(ROOT / "configs" / "smollm2-135m.toml"), "--json"]
    command += [f"model.path={MODEL}", f"run.dir={tmp_path / 'run'}", "gap.scope=all", *sampler]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    values = json.loads(printed)
    assert values["steps"] == 2
    assert values["tokens_different"] == 0
    assert values["tokens_compared"] > 1000
    assert values["gap_max"] == 0.0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["train/tokens"] for line in lines) > 0, "something must have been trained on"
    assert usage.ru_maxrss * 1024 < 6e9, "peak resident memory"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "checkpoints" / "step-000002" / "model", dtype=torch.float32
    )
    assert model.num_parameters() > 100e6
