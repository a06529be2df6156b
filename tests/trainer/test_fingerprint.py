"""The fingerprint sees what a short probe would not: many rows, late positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zerogap.models import decoder as decoder_module
from zerogap.models.config import ModelConfig
from zerogap.trainer.fingerprint import describe_numerics, fingerprint, probe_lengths

from ..support import config_values

SMALL = ModelConfig.from_dict(config_values(max_position_embeddings=2000))


def test_the_probe_fits_the_context() -> None:
    assert probe_lengths(SMALL) == [61, 1, 130, 1100, 408]
    lengths = probe_lengths(ModelConfig.from_dict(config_values(max_position_embeddings=100)))
    assert max(lengths) == 100
    assert sum(lengths) == 1700


def test_the_same_environment_gives_the_same_digest() -> None:
    first = fingerprint(SMALL)
    assert fingerprint(SMALL) == first
    assert describe_numerics(SMALL)["fingerprint"] == describe_numerics(SMALL)["fingerprint"] == first
    assert describe_numerics(SMALL)["threads"] == torch.get_num_threads()


def test_other_bits_with_many_rows_or_at_late_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound, rotary = fingerprint(SMALL), decoder_module.ops.rotary

    def many_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotary(x, cos, sin) * (1 + 2**-20 * (len(x) > 1000))

    def late_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = rotary(x, cos, sin)
        late = torch.arange(len(x)) == 61 + 1 + 130 + 1000  # position 1,000 of the fourth sequence
        return out * (1 + 2**-10 * late).view(-1, 1, 1)

    for fault in (many_rows, late_positions):
        monkeypatch.setattr(decoder_module.ops, "rotary", fault)
        assert fingerprint(SMALL) != sound
