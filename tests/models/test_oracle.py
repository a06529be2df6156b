"""Our decoder against transformers: float64 within 1e-9, float32 no worse than twice transformers' own error."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.support import config_values, random_decoder
from zerogap.models.decoder import Decoder
from zerogap.models.rows import PackedCache, Rows

CLASSES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def norms_in_their_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes RMSNorm in float32 even in a float64 model; as an oracle it must not."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for family in (transformers.models.qwen3, transformers.models.qwen2, transformers.models.llama):
        for module in vars(family).values():
            for name, kind in list(vars(module).items()) if hasattr(module, "__file__") else ():
                if name.endswith("RMSNorm"):
                    monkeypatch.setattr(kind, "forward", forward)


def peer(decoder: Decoder, family: str, **changes: object) -> torch.nn.Module:
    """The transformers model of the same weights and dtype."""
    values = config_values(family, **changes)
    values.pop("model_type")
    if "rope_parameters" in changes:
        values.pop("rope_theta")
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**values, attn_implementation="sdpa")).to(decoder.dtype).eval()
    model.load_state_dict(decoder.state_dict(), strict=not decoder.config.tie_embeddings)
    return model


def logits(decoder: Decoder, sequences: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return decoder.logits(decoder.hidden(Rows.packed(sequences), PackedCache()))


def peer_logits(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([tokens])).logits[0] for tokens in sequences])


def draw_sequences(vocabulary: int, lengths: tuple[int, ...] = (1, 40, 150, 17)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("rope", ROPES)
def test_float64_equals_transformers(family: str, rope: str) -> None:
    changes = {"rope_parameters": ROPES[rope]}
    decoder = random_decoder(family, dtype=torch.float64, **changes)
    sequences = draw_sequences(50)
    difference = logits(decoder, sequences) - peer_logits(peer(decoder, family, **changes), sequences)
    assert difference.abs().max() < 1e-9


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ],
)
def test_variants_in_float64(family: str, changes: dict[str, object]) -> None:
    decoder = random_decoder(family, dtype=torch.float64, **changes)
    sequences = draw_sequences(50)
    difference = logits(decoder, sequences) - peer_logits(peer(decoder, family, **changes), sequences)
    assert difference.abs().max() < 1e-9


@pytest.mark.parametrize("family", CLASSES)
def test_float32_error_is_at_most_twice_theirs(family: str) -> None:
    sequences = draw_sequences(50)
    exact = logits(random_decoder(family, dtype=torch.float64), sequences)
    decoder = random_decoder(family)
    ours = (logits(decoder, sequences) - exact).abs().max()
    theirs = (peer_logits(peer(decoder, family), sequences) - exact).abs().max()
    assert ours <= 2 * theirs
