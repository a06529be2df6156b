from pathlib import Path

import pytest


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of this folder can be named in a configuration."""
    monkeypatch.chdir(Path(__file__).parent)
