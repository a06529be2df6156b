"""Certify finds planted faults by name, and its certificate is what it says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zerogap.certify.command
from tests.support import config_values
from zerogap import ops
from zerogap.certify.attention import check_attention
from zerogap.certify.rows import THREADS, check_rows
from zerogap.certify.subjects import Subject, control_subject, our_subjects, torch_subjects
from zerogap.certify.whole import check_gradients
from zerogap.cli import run
from zerogap.facts.certificate import (
    certificates,
    cpu_identity,
    read_certificate,
    sealed,
    write_certificate,
)
from zerogap.models.config import ModelConfig
from zerogap.numerics import code_digest
from zerogap.ops.portable.elementwise import exp, tree_sum

CONFIG = ModelConfig.from_dict(config_values())
WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))


def split_by_row_count(x: Tensor) -> Tensor:
    half = 32 if len(x) > 4 else 64
    return sum(ops.linear(x[:, at : at + half], WEIGHT[:, at : at + half]) for at in range(0, 64, half))


def unordered_sum(x: Tensor) -> Tensor:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(len(x)))
    return tree_sum(x[:, order] * WEIGHT[0, order]).unsqueeze(1)


def neighbour_dependent(x: Tensor) -> Tensor:
    return ops.linear(x, WEIGHT) + 1e-6 * x.roll(1, 0)[:, :1]


def position_dependent_tail(x: Tensor) -> Tensor:
    out = ops.linear(x, WEIGHT)
    tail = len(x) // 8 * 8
    out[tail:] = ops.linear(x[tail:].flip(1), WEIGHT.flip(1)) if tail and tail < len(x) else out[tail:]
    return out


def one_sided_dtype(x: Tensor) -> Tensor:
    return ops.linear(x, WEIGHT) if len(x) == 1 else ops.linear(x.bfloat16().float(), WEIGHT)


def thread_dependent(x: Tensor) -> Tensor:
    return torch.stack([part.sum(1) for part in x.tensor_split(torch.get_num_threads(), 1)]).cumsum(0)[-1:].T


def poisoned(x: Tensor) -> Tensor:
    return ops.linear(x, WEIGHT) + 0 * x.sum()


FAULTS: dict[Callable[[Tensor], Tensor], str] = {
    split_by_row_count: "others: row 0 of 7",
    unordered_sum: "others: row 0 of 2",
    neighbour_dependent: "others: row 0 of 2",
    position_dependent_tail: "of 9 at",
    one_sided_dtype: "others: row 0 of 2",
    thread_dependent: "at 2 threads",
    poisoned: "NaN: row 0 of 2",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_at_its_smallest(fault: Callable[[Tensor], Tensor]) -> None:
    verdict = check_rows(Subject(fault.__name__, 64, fault), full=False)
    assert verdict.broken is not None
    assert FAULTS[fault] in str(verdict.broken)
    assert verdict.broken.elements > 0


def test_our_ops_hold_and_the_control_does_not() -> None:
    assert all(check_rows(subject, full=False).broken is None for subject in our_subjects(CONFIG))
    assert check_rows(control_subject(CONFIG), full=False).broken is not None


def test_attention_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_attention(CONFIG, full=False).broken is None
    honest = ops.attention

    def by_chunk(q: Tensor, k: Tensor, v: Tensor, plan: object, scale: float) -> Tensor:
        return honest(q, k, v, plan, scale) * (1 + 1e-6 * (q.shape[0] == 8))

    monkeypatch.setattr(ops, "attention", by_chunk)
    broken = check_attention(CONFIG, full=False).broken
    assert broken is not None
    assert "chunks of 7" in broken.company


def added(scores_TPH: Tensor, later_TP1: Tensor) -> Tensor:
    """A mask that adds a large negative number."""
    scores_TPH = scores_TPH + torch.where(later_TP1, -1e9, 0.0)
    return exp(scores_TPH - scores_TPH.amax(1, keepdim=True))


def multiplied(scores_TPH: Tensor, later_TP1: Tensor) -> Tensor:
    """A mask that multiplies by 0."""
    peak_T1H = scores_TPH.masked_fill(later_TP1, -torch.inf).amax(1, keepdim=True)
    return exp(scores_TPH - peak_T1H) * torch.where(later_TP1, 0.0, 1.0)


def selected(scores_TPH: Tensor, later_TP1: Tensor) -> Tensor:
    """The honest one."""
    scores_TPH = scores_TPH.masked_fill(later_TP1, -torch.inf)
    return exp(scores_TPH - scores_TPH.amax(1, keepdim=True))


def masked_by(mask: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention that keeps the row law but for its mask: sums in the order of the positions, over those that exist."""

    def attention(q: Tensor, k: Tensor, v: Tensor, plan: ops.AttentionPlan, scale: float) -> Tensor:
        out, first, share, size = [], 0, q.shape[1] // k.shape[1], plan.page_size
        for chunk in plan.chunks:
            stop = chunk.start + chunk.count
            slots = [chunk.block_table[p // size] * size + p % size for p in range(stop)]
            k_PHD, v_PHD = (x[slots].repeat_interleave(share, 1) for x in (k, v))
            q_THD = q[first : first + chunk.count]
            later_TP = torch.arange(stop) > torch.arange(chunk.start, stop).unsqueeze(1)
            weights_TPH = mask(tree_sum(q_THD.unsqueeze(1) * k_PHD) * scale, later_TP.unsqueeze(2))
            values_THD = (weights_TPH.unsqueeze(3) * v_PHD).cumsum(1)[:, -1]
            out.append(values_THD / weights_TPH.cumsum(1)[:, -1].unsqueeze(2))
            first += chunk.count
        return torch.cat(out)

    return attention


@pytest.mark.parametrize("mask", [added, multiplied])
def test_a_mask_that_does_not_select_is_found_by_loud_later_keys_alone(
    monkeypatch: pytest.MonkeyPatch, mask: Callable[[Tensor, Tensor], Tensor]
) -> None:
    monkeypatch.setattr(ops, "attention", masked_by(selected))
    assert check_attention(CONFIG, full=False).broken is None
    monkeypatch.setattr(ops, "attention", masked_by(mask))
    broken = check_attention(CONFIG, full=False).broken
    assert broken is not None
    assert "keys from position" in broken.company
    monkeypatch.setattr("zerogap.certify.attention._later_cases", lambda *arguments: ())
    assert check_attention(CONFIG, full=False).broken is None


def test_a_response_that_is_left_out_of_its_prompts_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(verdict.holds for verdict in check_gradients(CONFIG))
    honest = ops.attention

    def last_left_out(q: Tensor, k: Tensor, v: Tensor, plan: ops.AttentionPlan, scale: float) -> Tensor:
        last = plan.chunks[-1].count if len(plan.chunks) > 1 else 0
        out = honest(q, k, v, plan, scale)
        return torch.cat((out[: len(q) - last], honest(q, k.detach(), v.detach(), plan, scale)[len(q) - last :]))

    monkeypatch.setattr(ops, "attention", last_left_out)
    failed = [verdict.name for verdict in check_gradients(CONFIG) if not verdict.holds]
    assert failed == ["gradient of attention behind a shared prompt"]


def test_torch_ops_are_told_apart() -> None:
    """Whichever of torch's ops break here, the answer is a measurement: plain linear breaks below 8 rows with MKL."""
    verdicts = {subject.name: check_rows(subject, full=False) for subject in torch_subjects(CONFIG)}
    assert set(verdicts) >= {"q_proj", "silu_mul", "log_softmax"}
    if torch.backends.mkl.is_available():
        assert any(verdict.broken is not None for verdict in verdicts.values())


@pytest.fixture
def data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "zerogap" / "certificates"


def test_certificate(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert run(["certify", "--json"]) == 0
    torch.set_num_threads(before)
    printed = json.loads(capsys.readouterr().out)
    assert printed["holds"] is True
    assert printed["first_break"] is None
    ((path, record),) = certificates()
    assert str(path) == printed["certificate"]
    assert record["holds"] is True
    assert record["model"]["hidden_size"] == 128
    assert record["device"]["flags_digest"] == cpu_identity()["flags_digest"]
    assert record["software"]["code_digest"] == code_digest()
    assert record["threads"] == list(THREADS)
    assert sum(test["comparisons"] for test in record["tests"]) > 10_000
    assert any(test["test"].startswith("negative control") for test in record["tests"])


def test_a_fault_ends_in_exit_code_1(
    data_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = Subject("q_proj", 64, neighbour_dependent)
    monkeypatch.setattr(zerogap.certify.command, "our_subjects", lambda config, place: [subject])
    monkeypatch.setattr(zerogap.certify.command, "check_end_to_end", lambda *arguments: [])
    before = torch.get_num_threads()
    assert run(["certify", "--json"]) == 1
    torch.set_num_threads(before)
    printed = json.loads(capsys.readouterr().out)
    assert printed["first_break"]["test"] == "row law: q_proj"
    assert next(record for _, record in certificates())["holds"] is False


def test_bad_arguments(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "--ops", "tourch"]) == 2
    assert "did you mean 'torch'" in capsys.readouterr().err
    assert run(["certify", "--model", "/nowhere/model"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zerogap.certify.command, "_lines", lambda *_: pytest.fail("it began"))
    (tmp_path / "file").write_text("")
    for output, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "c.json", "File exists")):
        assert run(["certify", "--output", str(output)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-1] == f"zerogap: error: --output {output}: cannot be written ({why}); give another file"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_altered_certificates_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    write_certificate(sealed({"issued": "2026-01-01", "holds": False}), path)
    assert read_certificate(path)["holds"] is False
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(ValueError, match="altered"):
        read_certificate(path)
    (tmp_path / "two.json").write_text("[]")
    (tmp_path / "three.json").write_bytes(b"\xff\x00")
    assert list(certificates(tmp_path)) == []
    write_certificate(sealed({"issued": "2026-01-02"}), tmp_path / "four.json")
    write_certificate(sealed({"issued": "2026-01-03"}), tmp_path / "five.json")
    assert [p.name for p, _ in certificates(tmp_path)] == ["five.json", "four.json"]


def test_cpu_identity_reads_both_forms(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("model name\t: Some CPU\nflags\t\t: fpu avx2\n")
    (tmp_path / "arm").write_text("Features\t: fp asimd\nCPU part\t: 0xd0c\n")
    x86, arm, none = (cpu_identity(tmp_path / name) for name in ("x86", "arm", "absent"))
    assert x86["model"] == "Some CPU"
    assert arm["model"] == "0xd0c"
    assert len({x86["flags_digest"], arm["flags_digest"], none["flags_digest"]}) == 3


def test_full_form_has_more_of_everything() -> None:
    subject = our_subjects(CONFIG)[0]
    quick, full = (check_rows(subject, full) for full in (False, True))
    assert full.comparisons > 2 * quick.comparisons
    assert dataclasses.is_dataclass(full)
