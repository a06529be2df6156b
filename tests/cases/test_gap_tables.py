"""The reports whose evidence is per token or per step, given as the table or log that a user would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerogap.cli import run

RNG = np.random.default_rng(0)


def sample(number: int, size: float, tokens: int = 40, **more: Any) -> dict[str, Any]:
    """One sample whose mean abs(d) is about ``size``."""
    engine = -RNG.exponential(0.8, tokens)
    trainer = np.minimum(engine + RNG.normal(0, size * 1.25, tokens), 0.0)
    return {"sample": number, "logprob_engine": engine.tolist(), "logprob_trainer": trainer.tolist(), **more}


def codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[dict[str, Any]], *more: str
) -> dict[str, str]:
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    run(["gap", str(path), "--json", *more])
    source = json.loads(capsys.readouterr().out)["sources"][0]
    return {finding["code"]: finding["observed"] for finding in source["findings"]}


Found = tuple[Path, pytest.CaptureFixture[str]]


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Found:
    return tmp_path, capsys


def test_r039_shared_prefix_batches(place: Found) -> None:
    found = codes(*place, [sample(i, 0.21 if i % 2 else 0.012, batch_shared_prefix=800 * (i % 2)) for i in range(20)])
    assert "CASCADE_ATTENTION" in found


def test_r041_left_padding(place: Found) -> None:
    found = codes(*place, [sample(i, 0.0007 + 0.05 * i, left_pad=6 * i) for i in range(12)])
    assert "LEFT_PAD_POSITION_IDS" in found


def test_r048_outliers_at_slice_borders(place: Found) -> None:
    record = sample(0, 0.01, 4096)
    for position in (1023, 2047, 3071):
        record["logprob_trainer"][position] -= 9.0
    found = codes(*place, [record])
    assert "cp 2" in found["CP_BOUNDARY_LABEL"]


def test_r055_tokens_before_a_retraction(place: Found) -> None:
    records = [sample(i, 0.008, 400) for i in range(4)]
    records[1]["retracted_at"] = 210
    noise = RNG.normal(0, 0.39, 210)
    records[1]["logprob_trainer"][:210] = (np.array(records[1]["logprob_engine"][:210]) - np.abs(noise)).tolist()
    assert "RETRACT_ROUTE_MISPAIR" in codes(*place, records)


def test_r059_other_ids_for_the_same_text(place: Found) -> None:
    record = sample(0, 0.5, 2, engine_token_id=[258, 385], token_id=[15339, 99])
    assert "index 0" in codes(*place, [record])["RETOKENIZED"]
    shorter = {"sample": 0, "engine_ids": [258, 385, 7], "trainer_ids": [15339, 7],
               "rollout_log_probs": [-1.0, -2.0, -0.1], "log_probs": [-1.0, -2.0, -0.1]}  # fmt: skip
    assert "index 0" in codes(*place, [shorter])["RETOKENIZED"]


def test_r065_improbable_tokens_and_hosts_stay_apart(place: Found) -> None:
    records = []
    for host, factor in (("L20", 1.0), ("H20", 0.1)):
        for i in range(30):
            engine = np.log(RNG.choice([0.97, 0.5, 0.03], 60, p=[0.6, 0.3, 0.1]))
            size = np.where(engine > -0.1, 0.001, np.where(engine > -2.3, 0.02, 0.6)) * factor
            trainer = np.minimum(engine + RNG.normal(0, 1.25, 60) * size, 0)
            records.append({"sample": f"{host}{i}", "host": host, "logprob_engine": engine.tolist(),
                            "logprob_trainer": trainer.tolist()})  # fmt: skip
    found = codes(*place, records)
    assert "not a config error" in found["LOW_PROB_TAIL"]
    assert "L20" in found["HOSTS_DIFFER"]


def test_r092_cached_tokens(place: Found) -> None:
    found = codes(*place, [sample(i, 0.19 if i % 2 else 0.012, cached_tokens=42000 * (i % 2)) for i in range(20)])
    assert "STALE_PREFIX_CACHE" in found


def test_r040_the_trainer_against_itself(place: Found) -> None:
    record = sample(0, 0.01)
    record["logprob_trainer_second"] = (np.array(record["logprob_trainer"]) - 0.03).tolist()
    assert "TRAINER_NOT_BATCH_INVARIANT" in codes(*place, [record])


def test_r134_missing_values_are_counted_by_kind(place: Found) -> None:
    found = codes(
        *place, [{"sample": 0, "logprob_engine": [-0.1, None, float("nan"), -2.0], "logprob_trainer": [-0.1] * 4}]
    )
    assert "missing=2 (engine null 1, engine nan 1), gap over 2 tokens" in found["MISSING_LOGPROBS"]


def test_r136_zeros_at_the_tail(place: Found) -> None:
    values = [-0.1, -0.2, -0.3, -0.1, -0.5]
    found = codes(
        *place, [{"sample": 0, "logprob_engine": [*values, *[0.0] * 5], "logprob_trainer": [*values, *[-1.3] * 5]}]
    )
    assert "n=5" in found["PADDED_LOGPROBS"]


def test_r139_five_tokens_make_the_mean(place: Found) -> None:
    engine = (-RNG.exponential(0.8, 1000)).tolist()
    trainer = list(engine)
    for position in (3, 300, 401, 555, 900):
        trainer[position] -= 50.0
    found = codes(*place, [{"sample": 0, "logprob_engine": engine, "logprob_trainer": trainer}])
    assert "mean=0.25 median=0 p99=0 max=50" in found["OUTLIER_DOMINATED"]


def test_r141_null_at_the_turn_boundary(place: Found) -> None:
    record = {"sample": 0, "turn": [0, 0, 1, 1, 1], "logprob_engine": [-0.2, -0.1, None, -0.3, -0.1],
              "logprob_trainer": [-0.21, -0.1, -0.2, -0.3, -0.12]}  # fmt: skip
    found = codes(*place, [record])
    assert "x1, gap over 4 tokens" in found["BOUNDARY_NULL"]
    assert "MISSING_LOGPROBS" not in found


def test_r143_everything_masked(place: Found) -> None:
    found = codes(*place, [sample(0, 0.01, 512, loss_mask=[0] * 512)])
    assert "valid_tokens=0" in found["NO_DATA"]


def test_r144_an_appended_token_with_mask_1(place: Found) -> None:
    records = [sample(i, 0.01, 12, real_length=11) for i in range(4)]
    for record in records:
        record["logprob_engine"][-1] = 0.0
        record["logprob_trainer"][-1] = -0.4
    found = codes(*place, records)
    assert "with mask=1" in found["FRAMEWORK_APPENDED_TOKEN"]
    for record in records:
        record["loss_mask"] = [1] * 11 + [0]
    assert "FRAMEWORK_APPENDED_TOKEN" not in codes(*place, records)


def test_r145_padding_in_the_mask(place: Found) -> None:
    found = codes(*place, [sample(0, 0.01, 1024, real_length=800, finish_reason="length")])
    assert "PAD_IN_MASK 224 tokens" in found["PAD_IN_MASK"]


def test_r149_and_r157_bits_under_a_contract(place: Found) -> None:
    engine = (-RNG.exponential(0.8, 8192)).astype(np.float32)
    trainer = engine.copy()
    trainer[:3] -= np.float32(0.0078)
    record = {"sample": 0, "logprob_engine": engine.tolist(), "logprob_trainer": trainer.tolist()}
    assert "3 of 8192 tokens differ" in codes(*place, [record], "--contract", "c")["CONTRACT_BROKEN"]
    record["logprob_trainer"] = (engine - np.float32(4.768e-07)).tolist()
    assert "LOGSOFTMAX_IMPL" in codes(*place, [record], "--contract", "c")
