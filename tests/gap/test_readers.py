"""Sources of other programs, in the form these write them; real files where the writing program is here."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zerogap.errors import UsageError
from zerogap.gap.readers import Loaded, load
from zerogap.gap.readers.text_log import parse_metrics

STAMP = "[2026-09-11 22:43:16.263 actor_cell0_rank0]"


def series_of(path: Path, text: str, **options: Any) -> dict[str, list[float]]:
    path.write_text(text, encoding="utf-8")
    (series,) = load(path, **options).series
    return {"steps": series.steps.tolist(), **{k: [float(v) for v in vs] for k, vs in series.values.items()}}


def test_miles_dict_lines_with_bare_nan_doubled_and_ray_prefixes(tmp_path: Path) -> None:
    line = (
        "\x1b[36m(MegatronTrainRayActor pid=7, ip=10.0.0.2)\x1b[0m {s} log_utils.py:542 - step {n}: "
        "{{'train/loss': nan, "
        "'train/train_rollout_logprob_abs_diff': {v}, 'train/train_rollout_kl': inf, 'train/lr-pg_0': 1e-06, "
        "'train/step': {n}}}\n"
    )
    other = f"(RolloutManager pid=9) {STAMP} metrics.py:89 - rollout 1: {{'rollout/raw_reward': 0.25}}\n"
    text = "".join(line.format(s=STAMP, n=n, v=v) * 2 for n, v in ((0, 0.0145), (1, 0.0151))) + other
    found = series_of(tmp_path / "a.log", text)
    assert found["steps"] == [0, 1]
    assert found["abs_mean"] == [0.0145, 0.0151]
    assert found["lr"] == [1e-06, 1e-06]
    assert np.isinf(found["k3"]).all()


def test_verl_console_lines(tmp_path: Path) -> None:
    text = "".join(
        f"(TaskRunner pid=5) step:{n} - rollout_corr/kl:0.0012 - rollout_corr/k3_kl:{v} - actor/grad_norm:0.3 - "
        f"training/rollout_probs_diff_mean:np.float64(0.0042) - critic/rewards/mean:0.5\n"
        for n, v in ((1, 0.0011), (2, 0.0013))
    )
    found = series_of(tmp_path / "verl.log", text)
    assert found["steps"] == [1, 2]
    assert found["k3"] == [0.0011, 0.0013]
    assert found["k1"] == [0.0012, 0.0012]
    assert found["prob_abs_mean"] == [0.0042, 0.0042]
    assert found["reward"] == [0.5, 0.5]


def test_verl_jsonl_has_its_numbers_under_data(tmp_path: Path) -> None:
    records = [{"step": n, "data": {"rollout_corr/k3_kl": 0.001 * n, "actor/grad_norm": 0.2}} for n in (1, 2, 3)]
    found = series_of(tmp_path / "verl.jsonl", "".join(json.dumps(r) + "\n" for r in records))
    assert found["steps"] == [1, 2, 3]
    assert found["k3"] == [0.001, 0.002, 0.003]


def test_trl_printed_dictionaries_and_trainer_state(tmp_path: Path) -> None:
    names = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
    text = "".join(
        f"{{'loss': '0.01', '{names[0]}': '0.0{n}', '{names[1]}': 0.5, 'epoch': 0.{n}}}\n" for n in (1, 2, 3)
    )
    assert series_of(tmp_path / "trl.log", text)["abs_mean"] == [0.01, 0.02, 0.03]
    state = {"log_history": [{"step": n, names[0]: n / 100, "reward": 0.1, "epoch": 0.1} for n in (5, 10)]}
    found = series_of(tmp_path / "trainer_state.json", json.dumps(state, indent=2))
    assert found["steps"] == [5, 10]
    assert found["abs_mean"] == [0.05, 0.1]


@pytest.mark.parametrize(
    ("line", "quantity", "value"),
    [
        ("Step 4 | Time: 3.2s | Loss: 0.01 | Entropy: 0.4 | Mismatch KL: 0.0021 | Grad. Norm: 0.2", "k3", 0.0021),
        ('{"step": 4, "vllm_kl": 0.0007, "reward": 0.2}', "k1", 0.0007),
        ("step=4 policy/rollout_train_logprobs_abs_diff_mean=0.013 policy/x=1", "abs_mean", 0.013),
        ("Step 4: token_mult_prob_error: 1.021, gen_kl_error: 0.001", "mult_prob_error", 1.021),
        ('{"step": 4, "optim/kl_sample_train_v2": 0.003}', "k2", 0.003),
        ("step 4: {'bit_wise/logprob_diff/max': 4.8e-07, 'bit_wise/logprob_diff/mean': 1e-9}", "abs_max", 4.8e-07),
        ("iteration 4/100: behave_approx_kl: 0.0004", "k1", 0.0004),
        ("step 4: {'val/vllm_vs_local_logprob_diff_mean': 0.012}", "abs_mean", 0.012),
    ],
)
def test_other_frameworks_come_from_the_table_of_names(line: str, quantity: str, value: float) -> None:
    from zerogap.gap.names import metric_for

    step, found = parse_metrics(line)
    assert step == 4
    assert {metric_for(k).quantity: v for k, v in found.items() if metric_for(k)}[quantity] == value  # type: ignore[union-attr]


def test_probabilities_are_never_a_log_prob_gap(tmp_path: Path) -> None:
    found = series_of(tmp_path / "a.log", "step:1 - training/rollout_probs_diff_mean:0.004 - actor/lr:1e-6\n")
    assert "abs_mean" not in found


def test_csv_by_names_by_alias_and_by_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,sample,vllm_lp,hf\n0,a,-1.0,-1.5\n0,a,-2.0,-2.0\n0,b,,-1.0\n", encoding="utf-8")
    loaded = load(path, {"logprob_trainer": "hf"})
    assert loaded.accumulator.numbers().mean_abs == 0.25
    assert loaded.accumulator.numbers().missing["engine"] == {"boundary_null": 1}


def test_parquet_of_samples_with_list_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table(
            {"sample_index": [1, 2], "rollout_log_probs": [[-1.0, -2.0], [-3.0]], "log_probs": [[-1.0, -2.5], [-3.0]]}
        ),
        path,
    )
    numbers = load(path).accumulator.numbers()
    assert (numbers.compared, numbers.different) == (3, 1)


def test_float16_float64_and_integer_columns_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    engine = pa.array(np.array([-1.0, -2.0], dtype=np.float64))
    pq.write_table(
        pa.table({"logprob_engine": engine, "logprob_trainer": engine.cast(pa.float32()), "sample": [5, 5]}), path
    )
    assert load(path).accumulator.numbers().different == 0


def test_tensorboard_files_of_the_real_writer(tmp_path: Path) -> None:
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    summary = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(tmp_path))
    for step in range(5):
        value = summary.Summary.Value(tag="train/train_rollout_logprob_abs_diff", simple_value=0.01 + step / 1000)
        writer.add_event(event.Event(step=step, wall_time=1.0, summary=summary.Summary(value=[value])))
    writer.close()
    (series,) = load(next(tmp_path.glob("events.*"))).series
    assert series.steps.tolist() == [0, 1, 2, 3, 4]
    assert series.values["abs_mean"] == pytest.approx([0.010, 0.011, 0.012, 0.013, 0.014])
    assert load(tmp_path).series[0].steps.tolist() == [0, 1, 2, 3, 4]


def miles_dumps(folder: Path, *, bfloat16: bool = False) -> None:
    torch = pytest.importorskip("torch")
    (folder / "rollout_data").mkdir(parents=True)
    (folder / "train_data").mkdir()
    engine = [torch.tensor([-0.5004, -1.2501, -0.1003]), torch.tensor([-2.001, -0.3])]
    samples = [
        {"index": i, "tokens": [9, 9, *range(len(lp))], "response_length": len(lp), "loss_mask": [1] * len(lp),
         "rollout_log_probs": lp.tolist(), "reward": 1.0,
         "status": "completed", "weight_versions": ["3"], "response": "x"}
        for i, lp in enumerate(engine)
    ]  # fmt: skip
    torch.save({"rollout_id": 0, "metadata": {}, "samples": samples}, folder / "rollout_data" / "0.pt")
    cast = (lambda t: t.to(torch.bfloat16)) if bfloat16 else (lambda t: t)
    data = {"sample_indices": [0, 1], "log_probs": [cast(lp) for lp in engine],
            "rollout_log_probs": [cast(lp) for lp in engine],
            "loss_masks": [torch.ones(len(lp)) for lp in engine], "response_lengths": [3, 2]}  # fmt: skip
    torch.save(
        {"rollout_id": 0, "rank": 0, "rollout_data": data, "cp_rank": 0, "cp_size": 1}, folder / "train_data" / "0_0.pt"
    )


def test_miles_dumps_are_joined_so_that_gaps_below_bf16_show(tmp_path: Path) -> None:
    miles_dumps(tmp_path / "exact")
    numbers = load(tmp_path / "exact").accumulator.numbers()
    assert (numbers.compared, numbers.different) == (5, 0)
    miles_dumps(tmp_path / "rounded", bfloat16=True)
    numbers = load(tmp_path / "rounded").accumulator.numbers()
    assert numbers.compared == 5
    assert numbers.different >= 4
    alone = load(tmp_path / "rounded" / "train_data" / "0_0.pt").accumulator.numbers()
    assert alone.different == 0  # both sides rounded: what the averaged metric shows as zero


def test_one_side_alone_is_said(tmp_path: Path) -> None:
    miles_dumps(tmp_path)
    next((tmp_path / "train_data").glob("*.pt")).unlink()
    with pytest.raises(UsageError, match="only one side"):
        load(tmp_path)


def test_gzip_and_byte_order_marks(tmp_path: Path) -> None:
    text = "".join(f"step {n}: {{'train/train_rollout_logprob_abs_diff': {v}}}\n" for n, v in ((0, 0.5), (1, 0.25)))
    with gzip.open(tmp_path / "a.gz", "wt") as file:
        file.write(text)
    (tmp_path / "b.log").write_bytes(text.encode("utf-16"))
    (tmp_path / "c.log").write_bytes(b"\xef\xbb\xbf" + text.encode())
    for name in ("a.gz", "b.log", "c.log"):
        assert load(tmp_path / name).series[0].values["abs_mean"].tolist() == [0.5, 0.25], name


def test_a_name_that_is_nearly_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,train_rollout_logprob_abs_dif\n0,0.1\n1,0.2\n", encoding="utf-8")
    with pytest.raises(UsageError, match="did you mean"):
        load(path)


def test_our_own_run_folder(tmp_path: Path) -> None:
    loaded = own_run(tmp_path)
    assert loaded.kind == "zerogap run"
    assert loaded.facts["contract"] == "zerogap"
    assert loaded.accumulator.numbers().compared == 8
    assert loaded.series[0].values["reward"].tolist() == [0.0, 1.0]
    assert len(loaded.rollouts) == 4


def own_run(folder: Path) -> Loaded:
    """A run folder as `zerogap train` leaves it, written by its own writers."""
    pytest.importorskip("torch")
    from zerogap.rl.metrics import MetricsWriter
    from zerogap.rl.samples import Sample, write_samples

    generator = random.Random(0)
    with MetricsWriter(folder) as metrics:
        for step in range(2):
            metrics.write(step, {"gap/mean": 0.0, "gap/max": 0.0, "gap/tokens_compared": 4, "gap/tokens_different": 0,
                                 "reward/mean": float(step),
                                 "train/learning_rate": 1e-3, "train/grad_norm": 0.5})  # fmt: skip
            samples = []
            for number in range(2):
                logprobs = [float(np.float32(-generator.random())) for _ in range(2)]
                samples.append(
                    Sample(
                        0,
                        number,
                        "1+1=",
                        "2",
                        "2",
                        1.0,
                        "ok",
                        0.5,
                        "stop",
                        step,
                        [1, 2],
                        [3, 4],
                        logprobs,
                        logprobs,
                        [True, True],
                        0,
                    )
                )
            write_samples(folder, step, samples)
    (folder / "config.toml").write_text(
        '[rollout]\ntop_p = 1.0\n[model]\npath = "builtin:tiny-qwen3"\n', encoding="utf-8"
    )
    return load(folder)
