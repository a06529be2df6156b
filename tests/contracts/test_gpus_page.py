"""docs/gpus.md is what the contracts, the known GPUs and the certificates say."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerogap.contracts.gpus_page import gpus_page
from zerogap.contracts.schema import built_in
from zerogap.facts.certificate import sealed, write_certificate
from zerogap.facts.gpu import compiled_architectures, known_gpus

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"


def _row(page: str, gpu: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {gpu} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == gpus_page(), "run: python -m zerogap.contracts.gpus_page docs/gpus.md"


def test_compiled_architectures_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from zerogap.ops.triton.targets import TARGETS

    assert compiled_architectures() == set(TARGETS)


def test_contract_names_the_compiled_architectures() -> None:
    exact = next(contract for contract in built_in() if contract.name == "zerogap/exact")
    rule = next(item for item in exact.requirements if item.id == "gpu")
    capabilities, gfx = (set(group[0].value) for group in rule.any_of)
    named = {f"sm_{value.replace('.', '')}" for value in capabilities} | gfx
    assert named == compiled_architectures()


def test_statuses() -> None:
    page = gpus_page()
    assert _row(page, "GB10")[1:3] == ["sm_121", "compiles"]
    assert _row(page, "V100")[2] == "CPU only"
    assert "no: engine-gpu" in _row(page, "GB10")
    assert {gpu.architecture for gpu in known_gpus() if gpu.vendor == "amd"} >= {"gfx942", "gfx950"}
    # No contract is a yes by the GPU alone.
    assert "yes" not in {cell for row in page.splitlines() if row.startswith("| ") for cell in row.split(" | ")[2:]}


def test_a_certificate_shows_with_its_date(tmp_path: Path) -> None:
    device = {"kind": "gpu", "model": "NVIDIA GB10", "architecture": "sm_121"}
    body = {"issued": "2027-01-02T03:04:05Z", "holds": True, "device": device}
    write_certificate(sealed(body), tmp_path / "gb10.json")
    page = gpus_page(tmp_path)
    assert _row(page, "GB10")[2] == "**certified** 2027-01-02"
    assert _row(page, "B200")[2] == "compiles"
    write_certificate(sealed({**body, "issued": "2027-02-02T00:00:00Z", "holds": False}), tmp_path / "later.json")
    assert _row(gpus_page(tmp_path), "GB10")[2] == "**does not hold** 2027-02-02"
