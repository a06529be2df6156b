"""Running a probe against the test engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.probe.engine_server import Truth
from tests.probe.http_server import serve
from zerogap.probe.outcome import Finding
from zerogap.probe.run import Question, Result, probe

Asked = Callable[..., dict[str, Finding]]


def run_probe(truth: Truth, *only: str, full: bool = False, **question: object) -> Result:
    """Probe an engine that behaves as ``truth`` says."""
    with serve(truth) as address:
        return asyncio.run(probe(Question(address, full=full, only=only, **question)))  # type: ignore[arg-type]


@pytest.fixture
def asked() -> Asked:
    """Return the findings by name of a probe of an engine with the given behaviour."""

    def ask(truth: Truth, *only: str, full: bool = False) -> dict[str, Finding]:
        return {f.check.name: f for f in run_probe(truth, *only, full=full).findings}

    return ask
