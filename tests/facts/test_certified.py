"""A certificate counts only for the device, software and model that it was measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerogap import __version__, check
from zerogap.facts import certified
from zerogap.facts.certificate import cpu_identity, sealed, write_certificate
from zerogap.facts.certified import certificate_facts
from zerogap.facts.collect import Question, gather
from zerogap.facts.fact import Fact, Facts, parse_assumptions
from zerogap.numerics import NUMERICS_VERSION, code_digest

MODEL = "builtin:tiny-qwen3"


def _record(torch: object, **changes: Any) -> dict[str, Any]:
    body = {
        "issued": "2026-11-30T18:00:00Z",
        "holds": True,
        "device": {"kind": "cpu", **cpu_identity()},
        "software": {
            "zerogap": __version__,
            "numerics_version": NUMERICS_VERSION,
            "code_digest": code_digest(),
            "backend": "cpu-portable",
            "torch": torch,
        },
        "model": {
            "name": MODEL,
            "family": "qwen3",
            "layers": 4,
            "hidden_size": 128,
            "intermediate_size": 384,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "vocab_size": 64,
            "tied_embeddings": True,
            "rope": "default",
        },
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            body[part][key] = value  # type: ignore[index]
        else:
            body[part] = value
    return sealed(body)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("ZEROGAP_BACKEND", "portable")  # what the records speak of
    monkeypatch.setattr("zerogap.facts.gpu._nvidia", lambda: ([], "", {}))
    return tmp_path / "zerogap" / "certificates"


def _torch() -> object:
    return gather(Question(model=MODEL))["software.torch"].value


def test_no_certificate(folder: Path) -> None:
    report = check(model=MODEL, contracts="zerogap/exact")
    assert report.exit_code == 3
    assert "no certificate on this machine" in report.facts.unknown["certificate.holds"]


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_a_certificate_that_fits(folder: Path, holds: bool, code: int) -> None:
    write_certificate(_record(_torch(), holds=holds), folder / "a.json")
    report = check(model=MODEL, contracts="zerogap/exact")
    assert report.exit_code == code
    assert "a.json" in report.facts["certificate.holds"].source


OTHERS = {
    "another CPU": {"device__flags_digest": "0"},
    "another machine": {"device__model": "other"},
    "another torch": {"software__torch": "2.11.0"},
    "other sources": {"software__code_digest": "0"},
    "another backend": {"software__backend": "cpu-native"},
    "another model": {"model__layers": 5},
    "another head size": {"model__head_dim": 64},
    "untied": {"model__tied_embeddings": False},
    "a number for a yes": {"model__tied_embeddings": 1},
    "no verdict": {"holds": "yes"},
    "no model": {"model": None},
}


@pytest.mark.parametrize("title", OTHERS)
def test_a_certificate_of_something_else_counts_for_nothing(folder: Path, title: str) -> None:
    write_certificate(_record(_torch(), **OTHERS[title]), folder / "a.json")
    report = check(model=MODEL, contracts="zerogap/exact")
    assert report.exit_code == 3
    assert "a.json" in report.facts.unknown["certificate.holds"]


def test_an_altered_certificate_counts_for_nothing(folder: Path) -> None:
    write_certificate(_record(_torch()), folder / "a.json")
    text = (folder / "a.json").read_text()
    (folder / "a.json").write_text(text.replace('"layers":4', '"layers":5'))
    assert check(model=MODEL, contracts="zerogap/exact").exit_code == 3


def test_a_model_whose_sizes_are_unknown_fits_no_certificate(folder: Path) -> None:
    write_certificate(_record(_torch(), model__layers=36, model__hidden_size=2560), folder / "a.json")
    facts = certificate_facts(gather(Question(model="Qwen3-4B")))
    assert "certificate.holds" not in facts
    assert "not known here" in facts.unknown["certificate.holds"]


def test_a_planned_machine_takes_no_certificate_of_this_one(folder: Path) -> None:
    write_certificate(_record(_torch()), folder / "a.json")
    assert "certificate.holds" not in check(model=MODEL, gpu="GB10").facts


GPU = {"kind": "gpu", "model": "NVIDIA GB10", "architecture": "sm_121"}


def _gpu_facts(tmp_path: Path, **changes: str) -> Facts:
    values = {
        "zerogap.backend": "gpu-triton",
        "gpu.engine.name": "NVIDIA GB10",
        "gpu.engine.capability": "12.1",
        "gpu.engine.gfx": "absent",
        "software.triton": "3.6.0",
    } | changes
    stated = parse_assumptions([f"{name}={value}" for name, value in values.items()])
    return stated.over(gather(Question(model=MODEL)))


def test_a_gpu_certificate_counts_for_a_run_on_that_gpu_alone(folder: Path, tmp_path: Path) -> None:
    record = _record(_torch(), device=GPU, software__backend="gpu-triton", software__triton="3.6.0")
    write_certificate(record, folder / "gpu.json")
    assert certificate_facts(_gpu_facts(tmp_path))["certificate.holds"].value is True
    assert "certificate.holds" not in certificate_facts(gather(Question(model=MODEL)))  # a run on the CPU beside it
    for name, value in (("gpu.engine.name", "NVIDIA B200"), ("software.triton", "3.7.0")):
        other = certificate_facts(_gpu_facts(tmp_path, **{name: value}))
        assert "gpu.json" in other.unknown["certificate.holds"]


def test_a_gpu_is_unknown_until_certified_and_the_command_is_said() -> None:
    report = check(
        model=MODEL, gpu="GB10", contracts="zerogap/exact", assume=["zerogap.backend=gpu-triton", "host.os=Linux"]
    )
    assert str(report.verdict) == "unknown"
    hints = {how for item in report.judgements[0].findings for how in item.missing.values()}
    assert any("zerogap certify" in how and "--device cuda:0" in how for how in hints)


def test_a_gpu_without_kernels_is_refused() -> None:
    report = check(gpu="V100", contracts="zerogap/exact", assume=["zerogap.backend=gpu-triton"], only="gpu")
    assert str(report.verdict) == "no"


def test_the_backend_is_what_a_run_would_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(installed: str) -> Fact:
        return certificate_facts(Facts({"software.zerogap_kernels": Fact(installed, "site-packages")}))[
            "zerogap.backend"
        ]

    monkeypatch.delenv("ZEROGAP_BACKEND", raising=False)
    monkeypatch.setattr(certified, "kernels_missing", lambda: None)
    assert backend("0.1.0").value == "cpu-native"
    assert backend("absent").value == "cpu-portable"
    monkeypatch.setattr(certified, "kernels_missing", lambda: "zerogap-kernels does not load: no libstdc++")
    assert backend("0.1.0") == Fact("cpu-portable", "site-packages, but zerogap-kernels does not load: no libstdc++")
    monkeypatch.setenv("ZEROGAP_BACKEND", "native")
    assert backend("0.1.0") == Fact("cpu-native", "ZEROGAP_BACKEND=native")
