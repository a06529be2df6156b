"""Log-probs fused with the LM head: the engine's own bits, gradients, chunks, replay, and a control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.triton.interpreted.laws import DEVICE, normal, relative_error, row_law_holds, same
from zerogap.ops.portable import SamplerRows
from zerogap.ops.triton import logprob, sampling

VOCABULARY, WIDTH = 1100, 64
SETTINGS = {"plain": {}, "temperature": {"temperature": 0.7}, "filtered": {"top_k": 20, "top_p": 0.9}}


def _inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    target = torch.randint(VOCABULARY, (rows,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    return normal(rows, WIDTH, dtype=dtype), (normal(VOCABULARY, WIDTH) / 4).to(dtype), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_and_engine_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    hidden, head, _ = _inputs(3, dtype)
    rows = SamplerRows.uniform_settings(3, **SETTINGS[name])
    engine = [
        sampling.log_distribution(logprob.linear_rows(hidden[row : row + 1], head), rows[row : row + 1])
        for row in range(3)
    ]
    token = torch.cat([sampling.draw(one, torch.tensor([0.3], dtype=torch.float64)) for one in engine])
    recorded = torch.cat([one.logprobs_of(token[row : row + 1]) for row, one in enumerate(engine)])
    scored = logprob.token_logprobs(hidden, head, token, rows, want_kept=True)
    assert scored.logprob_R.dtype == torch.float32
    assert same(scored.logprob_R, recorded)
    assert same(scored.entropy_R, torch.cat([one.entropy_R for one in engine]))
    again = logprob.token_logprobs(hidden, head, token, replace(rows, kept=scored.kept))
    assert same(again.logprob_R, recorded)


def test_values_and_gradients_against_float64() -> None:
    hidden, head, target = _inputs(4)
    rows = SamplerRows.uniform_settings(4, temperature=0.7)
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    ours = logprob.token_logprobs(*leaves, target, rows).logprob_R
    true = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1).gather(1, target.unsqueeze(1)).squeeze(1)
    assert relative_error(ours, true) < 1e-6
    upstream = normal(4)
    our_grads = torch.autograd.grad(ours, leaves, upstream)
    true_grads = torch.autograd.grad(true, exact, upstream.double())
    assert max(relative_error(a, b) for a, b in zip(our_grads, true_grads, strict=True)) < 1e-5


def test_chunks_change_no_forward_bit_and_hardly_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, target = _inputs(3)
    rows = SamplerRows.uniform_settings(3)
    results = []
    for size in (1, 3):
        monkeypatch.setattr(logprob, "_LOGITS_AT_ONCE", size * VOCABULARY)
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        out = logprob.token_logprobs(*leaves, target, rows).logprob_R
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert same(results[0][0], results[1][0])
    assert relative_error(results[0][1], results[1][1]) < 1e-6
    assert relative_error(results[0][2], results[1][2]) < 1e-6


def test_row_law() -> None:
    _, head, _ = _inputs(1)

    def run(hidden: Tensor) -> Tensor:
        rows = SamplerRows.uniform_settings(len(hidden))
        target = torch.full((len(hidden),), 7, device=DEVICE)
        return logprob.token_logprobs(hidden, head, target, rows).logprob_R.unsqueeze(1)

    def control(hidden: Tensor) -> Tensor:
        rows = SamplerRows.uniform_settings(len(hidden))
        target = torch.full((len(hidden),), 7, device=DEVICE)
        shift = 16 * len(hidden)  # the order in which K is walked depends on the number of rows
        rolled = hidden.roll(shift, 1).contiguous(), head.roll(shift, 1).contiguous()
        return logprob.token_logprobs(*rolled, target, rows).logprob_R.unsqueeze(1)

    pool = normal(3, WIDTH)
    assert row_law_holds(run, pool, counts=(3,))
    assert not row_law_holds(control, pool, counts=(2, 3))
