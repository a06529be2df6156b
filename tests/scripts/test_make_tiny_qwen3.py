"""The shipped model is what its script says: unsure, small, and never trained on the held-out split."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from zerogap.models.hub import resolve_model

SCRIPT = Path(__file__).parents[2] / "scripts/make_tiny_qwen3.py"


@pytest.fixture(scope="module")
def script():
    import sys

    spec = importlib.util.spec_from_file_location("make_tiny_qwen3", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


def test_split_is_disjoint_and_whole(script):
    training, held_out = script.split_pairs()
    assert len(training) + len(held_out) == len(set(training) | set(held_out)) == 90 * 90
    assert 0.08 < len(held_out) / 8100 < 0.13


def test_labels_stand_on_the_answer_only(script):
    tokens, labels = script.build_rows([(12, 34), (99, 99)], script.build_tokenizer())
    answer = labels != script.IGNORED
    assert answer.sum(dim=1).tolist() == [3, 4]
    assert not answer[:, : script.PROMPT_LENGTH].any()
    assert (tokens[answer] == labels[answer]).all()


def test_shipped_tokenizer_is_the_scripts(script):
    shipped = json.loads((resolve_model("builtin:tiny-qwen3") / "tokenizer.json").read_text())
    assert shipped == json.loads(script.build_tokenizer().to_str())


def test_shipped_model_is_unsure(script):
    model = script.transformers.Qwen3ForCausalLM.from_pretrained(resolve_model("builtin:tiny-qwen3"))
    _, held_out = script.split_pairs()
    assert 0.30 <= script.expected_accuracy(model, *script.build_rows(held_out, script.build_tokenizer())) <= 0.55


@pytest.mark.slow
def test_shipped_model_samples_as_expected(script):
    model = script.transformers.Qwen3ForCausalLM.from_pretrained(resolve_model("builtin:tiny-qwen3"))
    _, held_out = script.split_pairs()
    rows = script.build_rows(held_out, script.build_tokenizer())
    # 858 draws: four standard deviations are 0.07
    assert abs(script.answered(model, *rows, sample=True) - script.expected_accuracy(model, *rows)) < 0.07
