"""The memory plan of a run on one GPU: pure arithmetic, so it is tested without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support import config_values

from zerogap.errors import UsageError
from zerogap.models.config import ModelConfig
from zerogap.rl import gpu_memory, setup
from zerogap.rl.config_load import parse_config
from zerogap.rl.gpu_memory import GpuPlan, host_part, plan_gpu, require_fit
from zerogap.rl.memory import estimate_memory

GIB = 2**30
PAGE = 2 * 36 * 8 * 16 * 128 * 4
QWEN3_4B = ModelConfig.from_dict(
    config_values(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
)
PARAMETERS = 4.0e9


def plan(*overrides: str, free: int = 139 * GIB, longest: int = 2048, shape: ModelConfig = QWEN3_4B) -> GpuPlan:
    raw = {"run": {"dir": "x", "steps": 1}, "model": {"path": "p", "device": "cuda:0"}}
    config = parse_config(raw, "run.toml", overrides)
    return plan_gpu(config, shape, estimate_memory(config, shape, longest), longest, PAGE, free)


def test_weights_are_counted_once_for_both_sides() -> None:
    shared, own = plan(), plan("engine.weights=own")
    assert shared.weights == pytest.approx(4 * PARAMETERS, rel=0.02)
    assert own.weights == 2 * shared.weights
    assert shared.optimiser == 2 * shared.gradients


def test_training_and_rollout_take_turns() -> None:
    found = plan("train.gradient_checkpointing=true")
    stays = found.weights + found.gradients + found.optimiser + found.captured + found.slack + found.kv_cache
    assert found.total == stays + max(found.training, found.rollout)


def test_the_cache_gets_what_is_left_up_to_what_is_of_use() -> None:
    roomy = plan("train.gradient_checkpointing=true", "engine.max_sequences=16", free=200 * GIB)
    assert roomy.kv_chosen
    assert roomy.kv_cache == (16 * 128 + 1) * PAGE, "16 sequences of 2048 tokens, and the page of the padding"
    tight = plan("train.gradient_checkpointing=true", free=96 * GIB)
    assert tight.kv_cache % PAGE == 0
    assert 0 <= tight.free - tight.total < PAGE, "all that is left, in whole pages"
    require_fit(tight, "cuda:0")


@pytest.mark.parametrize(("override", "pages"), [("engine.num_pages=300", 301), (f"engine.kv_bytes={300 * PAGE}", 301)])
def test_what_the_configuration_says_is_kept(override: str, pages: int) -> None:
    found = plan(override)
    assert (found.kv_cache, found.kv_chosen) == (pages * PAGE, False)


def test_a_run_that_does_not_fit_is_refused_with_what_to_do() -> None:
    small = plan(free=24 * GIB)
    with pytest.raises(UsageError, match=r"model.device = cuda:1: the run needs .* GiB of its memory") as caught:
        require_fit(small, "cuda:1")
    text = str(caught.value)
    assert "24.00 GiB is free" in text
    assert "train.tokens_per_micro_batch" in text
    assert "a smaller model" in text
    assert "engine.kv_bytes" not in text, "the run chose the cache itself"
    with pytest.raises(UsageError, match=r"lower engine\.kv_bytes"):
        require_fit(plan(f"engine.kv_bytes={100 * GIB}"), "cuda:0")
    assert "\n" not in text


def test_a_cache_for_one_sequence_is_the_least() -> None:
    none = plan("train.gradient_checkpointing=true", free=40 * GIB)
    assert none.kv_cache == none.kv_least + PAGE
    with pytest.raises(UsageError):
        require_fit(none, "cuda:0")


def test_the_line_at_the_start() -> None:
    text = plan("train.gradient_checkpointing=true").describe()
    assert text.startswith("GPU memory: ")
    assert "KV cache" in text
    assert "(chosen)" in text
    assert "\n" not in text
    assert "(chosen)" not in plan("engine.num_pages=300").describe()


def test_the_machine_s_memory_holds_the_weights_while_they_are_read() -> None:
    raw = {"run": {"dir": "x", "steps": 1}, "model": {"path": "p", "device": "cuda:0"}}
    config = parse_config(raw, "run.toml", ())
    whole = estimate_memory(config, QWEN3_4B, 2048)
    part = host_part(whole)
    assert part.total == whole.weights + whole.kept_sets + whole.processes
    assert part.total < whole.total / 4


def test_set_up_refuses_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is nearly full: neither weights nor engine are made."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * 2**20, 80 * GIB))
    monkeypatch.setattr(gpu_memory, "PagedCache", SimpleNamespace(page_bytes=lambda *sizes: 1024))

    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(setup, "load_decoder", never)
    raw = {
        "run": {"dir": str(tmp_path / "run"), "steps": 1},
        "model": {"path": "builtin:tiny-qwen3", "device": "cuda:0"},
    }
    with pytest.raises(UsageError, match=r"model.device = cuda:0: .*0.06 GiB is free"):
        setup.set_up(parse_config(raw, "run.toml", ()), None)
