"""``zerogap train`` checks first: what cannot hold does not start, and the report lies in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerogap.contracts.report import store_check
from zerogap.contracts.rules import Verdict
from zerogap.contracts.training import training_report
from zerogap.errors import ExitCode, NotHeldError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}


def _model(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return folder


def test_unknown_without_a_certificate_may_train(tmp_path: Path) -> None:
    report = training_report(_model(tmp_path / "m"))
    assert report.verdict is Verdict.UNKNOWN
    assert report.missing == ("certificate.holds",)
    body = json.loads(store_check(report, tmp_path).read_text())
    assert (body["schema"], body["verdict"], body["decisive"]) == ("zerogap.check", "unknown", ["zerogap/exact"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"]}, "linear"),
        ({"model_type": "gpt_oss"}, "gpt_oss"),
    ],
)
def test_a_model_that_cannot_hold_does_not_start(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(NotHeldError, match=words) as caught:
        training_report(_model(tmp_path / "m", **changes))
    assert caught.value.exit_code == ExitCode.DOES_NOT_HOLD
    assert "\n" not in str(caught.value)
