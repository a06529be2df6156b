"""Parameters in bfloat16 are moved through float32 masters: nothing small is lost, on the way or at a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support import config_values, random_decoder, same_bits
from tests.trainer.support import draw_sequences, record_logprobs
from zerogap import ops
from zerogap.errors import UsageError, ZerogapError
from zerogap.models.decoder import Decoder
from zerogap.models.weights import load_decoder, weights_digest
from zerogap.ops import backend
from zerogap.trainer import RunState, load_weights, open_checkpoint, restore_optimiser, save_checkpoint
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings
from zerogap.trainer.step import StepSettings, accumulate

BF16 = torch.bfloat16
native = pytest.mark.skipif(bool(backend.native_missing()), reason="no zerogap-kernels")


@pytest.fixture(params=[pytest.param("native", marks=native), "portable"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which one moves the masters; the model's own ops are the portable ones in bfloat16."""
    with backend.using(request.param):
        yield


def words(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int16)


def is_rounded_master(optimiser: Optimiser) -> bool:
    return all(
        torch.equal(words(parameter), words(optimiser.masters[name].to(BF16)))
        for name, parameter in optimiser.parameters.items()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tiny_updates_move_the_weight_and_without_masters_do_not(each_backend: None, dtype: torch.dtype) -> None:
    step = float(torch.finfo(dtype).eps) / 20  # AdamW moves by about the rate; half a step below 1 is eps / 4
    parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
    control = nn.Parameter(parameter.detach().clone())
    optimiser = Optimiser([("w", parameter)], OptimiserSettings(learning_rate=step))
    alone = torch.optim.AdamW([control], lr=step, weight_decay=0.0)
    for update in range(40):
        parameter.grad, control.grad = torch.full((3, 5), 0.3), torch.full((3, 5), 0.3, dtype=dtype)
        optimiser.apply()
        alone.step()
        moved = 1 - optimiser.masters["w"]
        assert bool((moved > (update + 0.9) * step).all()), "the master takes every update"
        if update == 2:
            assert bool((parameter == 1).all()), "these updates are below half a step of the format"
        assert torch.equal(words(parameter), words(optimiser.masters["w"].to(dtype)))
    assert bool((parameter.float() < 1 - 0.9 * 40 * step).all())
    assert bool((control == 1).all()), "without a master each update is rounded away"


def test_masters_are_rounded_to_nearest_and_ties_to_even() -> None:
    step = 2.0**-7  # of bfloat16 in [1, 2)
    exact = [1 + 0.5 * step, 1 + 1.5 * step, 1 + 0.5001 * step, 1 + 0.4999 * step, -1 - 2.5 * step]
    parameter = nn.Parameter(torch.ones(len(exact), dtype=BF16))
    optimiser = Optimiser([("w", parameter)], OptimiserSettings(learning_rate=1e-30))
    optimiser.masters["w"].data = torch.tensor(exact)
    parameter.grad = torch.zeros(len(exact))
    optimiser.apply()
    expected = [1, 1 + 2 * step, 1 + step, 1, -1 - 2 * step]
    assert parameter.tolist() == expected


def weight_gradient(parameter: nn.Parameter, scales: tuple[float, ...]) -> Tensor:
    for scale in scales:
        x = torch.full((1, 64), 1.0, dtype=BF16)
        (ops.linear(x, parameter).float() * scale).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


def test_gradients_of_micro_batches_add_up_in_float32_and_without_masters_do_not() -> None:
    parameter = nn.Parameter(torch.zeros(2, 64, dtype=BF16))
    Optimiser([("w", parameter)], OptimiserSettings())
    gradient = weight_gradient(parameter, (1.0, 2.0**-12, 2.0**-12))
    assert gradient.dtype == torch.float32
    assert bool((gradient == 1 + 2.0**-11).all())
    control = nn.Parameter(torch.zeros(2, 64, dtype=BF16))
    assert bool((weight_gradient(control, (1.0, 2.0**-12, 2.0**-12)) == 1).all())


def test_a_micro_batch_gives_its_gradients_unrounded() -> None:
    decoder = random_decoder(dtype=BF16, tie_word_embeddings=True)
    optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings())
    accumulate(decoder, optimiser, record_logprobs(decoder, draw_sequences(6), shift=0.1), StepSettings())
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        kept = parameter.grad != parameter.grad.to(BF16).float()
        assert bool(kept.any()), f"{name}: every element happens to be one of bfloat16"
    squares = [parameter.grad.double().square().sum().item() for parameter in decoder.parameters()]
    assert optimiser.apply().grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)


def test_gradients_are_near_those_in_float64() -> None:
    """The same weights in float64; bfloat16 rows round at about 2^-9."""
    narrow = random_decoder(dtype=BF16, tie_word_embeddings=True)
    exact = random_decoder(dtype=torch.float64, tie_word_embeddings=True)
    with torch.no_grad():
        for one, other in zip(exact.parameters(), narrow.parameters(), strict=True):
            one.copy_(other)
    Optimiser(narrow.named_parameters(), OptimiserSettings())
    sequences = draw_sequences(8)
    for decoder in (narrow, exact):
        accumulate(decoder, Optimiser([], OptimiserSettings()), record_logprobs(decoder, sequences), StepSettings())
    for (name, one), other in zip(exact.named_parameters(), narrow.parameters(), strict=True):
        error = (other.grad.double() - one.grad).norm() / one.grad.norm()
        assert error < 0.05, f"{name}: {error:.3f}"


def test_an_update_repeats_bit_for_bit(each_backend: None) -> None:
    found = []
    for _ in range(2):
        decoder = random_decoder(dtype=BF16)
        optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(1e-2))
        train(decoder, optimiser, range(2), rows=20)
        assert is_rounded_master(optimiser)
        found.append([*(p.detach().float() for p in decoder.parameters()), *optimiser.state_tensors().values()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_gradient_checkpointing_changes_no_bit() -> None:
    found = []
    for recomputed in (False, True):
        decoder = random_decoder(dtype=BF16)
        decoder.gradient_checkpointing = recomputed
        optimiser = Optimiser(decoder.named_parameters(), OptimiserSettings(1e-2))
        train(decoder, optimiser, range(2))
        found.append(optimiser.masters)
    assert all(same_bits(master.detach(), found[1][name].detach()) for name, master in found[0].items())


def test_a_gradient_that_is_not_finite_moves_no_master() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimiser = Optimiser([("w", parameter)], OptimiserSettings())
    parameter.grad = torch.tensor([0.0, torch.inf, 0.0])
    with pytest.raises(ZerogapError, match="gradient of w"):
        optimiser.apply()
    assert bool((optimiser.masters["w"] == 1).all())


def train(decoder: Decoder, optimiser: Optimiser, updates: range, rows: int = 2048) -> None:
    for update in updates:
        sequences = record_logprobs(decoder, draw_sequences(4, seed=update))
        accumulate(decoder, optimiser, sequences, StepSettings(micro_batch_rows=rows))
        optimiser.apply()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_values(torch_dtype="float32")))
    return folder


def saved(run: Path, source: Path, decoder: Decoder, optimiser: Optimiser) -> Path:
    state = RunState(3, optimiser.updates, "c0ffee", weights_digest(decoder.state_dict()))
    return save_checkpoint(run, state, decoder, source, optimiser, keep=1)


SETTINGS = OptimiserSettings(1e-4, weight_decay=0.1, schedule="cosine", warmup_updates=1, total_updates=8)


def test_six_updates_equal_three_and_resume_and_three(tmp_path: Path, source: Path) -> None:
    straight = random_decoder(dtype=BF16)
    one = Optimiser(straight.named_parameters(), SETTINGS)
    train(straight, one, range(6))

    first = random_decoder(dtype=BF16)
    optimiser = Optimiser(first.named_parameters(), SETTINGS)
    train(first, optimiser, range(3))
    found = open_checkpoint(saved(tmp_path / "run", source, first, optimiser))
    second = load_weights(found, BF16)
    two = Optimiser(second.named_parameters(), SETTINGS)
    restore_optimiser(found, two)
    train(second, two, range(3, 6))
    assert weights_digest(second.state_dict()) == weights_digest(straight.state_dict())
    assert all(same_bits(two.masters[name], master) for name, master in one.masters.items())
    # Negative control: masters that begin at the rounded weights, with the moments, part from those that were kept.
    control = load_weights(found, BF16)
    three = Optimiser(control.named_parameters(), SETTINGS)
    restore_optimiser(found, three)
    for name, parameter in control.named_parameters():
        three.masters[name].data = parameter.detach().float()
    train(control, three, range(3, 6))
    assert not all(same_bits(three.masters[name], master) for name, master in one.masters.items())


def test_the_model_folder_is_a_bfloat16_checkpoint(tmp_path: Path, source: Path) -> None:
    decoder = random_decoder(dtype=BF16)
    optimiser = Optimiser(decoder.named_parameters(), SETTINGS)
    train(decoder, optimiser, range(1))
    folder = saved(tmp_path / "run", source, decoder, optimiser)
    tensors = load_file(folder / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {BF16}
    assert json.loads((folder / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert weights_digest(load_decoder(folder / "model", BF16).state_dict()) == weights_digest(decoder.state_dict())
    state = load_file(next(folder.glob("optimiser-*")))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert sum(name.startswith("master.") for name in state) == len(tensors)


def test_a_state_without_its_masters_or_with_others_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=BF16))
    optimiser = Optimiser([("w", parameter)], OptimiserSettings())
    with pytest.raises(UsageError, match="state of w lacks master"):
        optimiser.restore(1, [])
    with pytest.raises(UsageError, match="master of w does not round to the weight"):
        optimiser.restore(1, [("master.w", torch.full((3,), 1.5))])
    optimiser.restore(1, [("master.w", torch.full((3,), 1 + 2.0**-10))])
    assert bool((optimiser.masters["w"] == 1 + 2.0**-10).all())
    wide = Optimiser([("w", nn.Parameter(torch.ones(3)))], OptimiserSettings())
    with pytest.raises(UsageError, match="state of w has master"):
        wide.restore(1, [("master.w", torch.ones(3))])
