"""RMSNorm, rotary, gated SiLU and embedding: portable bits, row law, gradients, repeatability, and a control."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.ops.triton.interpreted.laws import (
    DEVICE,
    INTERPRETED,
    bits,
    gradients,
    normal,
    relative_error,
    row_law_holds,
    same,
)
from zerogap.ops import portable
from zerogap.ops.portable.elementwise import tree_sum
from zerogap.ops.triton import norm, rowwise
from zerogap.ops.triton.rotary import qk_norm_rotary
from zerogap.ops.triton.rotary import rotary as triton_rotary
from zerogap.ops.triton.run import row_config, run

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in single IEEE operations with its rounding points; roots by float64, whose rounding is exact."""
    wide = x.float()
    mean = tree_sum(wide * wide).div_(x.shape[-1]).add_(EPS)
    scale = mean.double().sqrt().float().reciprocal_().unsqueeze(-1)
    return ((wide * scale).to(x.dtype).float() * weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(5, 64), (3, 96), (2, 2560), (1, 1)])
def test_norm_has_its_rounding_points(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, residual = normal(rows, width, dtype=dtype), 1 + normal(width, dtype=dtype) / 8, normal(rows, width + 0)
    residual = residual.flip(0).to(dtype)
    assert same(norm.rms_norm(x, weight, EPS), _norm(x.cpu(), weight.cpu()))
    total, out = norm.add_rms_norm(x, residual, weight, EPS)
    assert same(total, x.cpu() + residual.cpu())
    assert same(out, _norm(total.cpu(), weight.cpu()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 96, 128])
def test_rotary_and_fused_norm_are_the_single_ops(width: int, dtype: torch.dtype) -> None:
    rows, heads = 3, 3
    x, weight = normal(rows, heads, width, dtype=dtype), 1 + normal(width, dtype=dtype) / 8
    angle = normal(rows, width // 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    assert same(triton_rotary(x, cos, sin), portable.rotary(x.cpu(), cos.cpu(), sin.cpu()))
    fused = qk_norm_rotary(x, weight, EPS, cos, sin)
    assert same(fused, triton_rotary(norm.rms_norm(x, weight, EPS), cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate, up = 4 * normal(5, 300, dtype=dtype), normal(5, 300, seed=1, dtype=dtype)
    out = rowwise.silu_mul(gate, up)
    if INTERPRETED:
        silu = portable.silu_mul(gate.float(), torch.ones_like(gate, dtype=torch.float32)).to(dtype)
        assert same(out, (silu.float() * up.float()).to(dtype))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert relative_error(out, exact) < (1e-6 if dtype == torch.float32 else 1e-2)


def _subjects() -> dict[str, tuple[int, object]]:
    weight, residual_weight = 1 + normal(96) / 8, 1 + normal(96, seed=1) / 8
    cos, sin = normal(1, 24).cos(), normal(1, 24).sin()

    def heads(x: Tensor) -> Tensor:
        x_RHD = x.unflatten(1, (2, 48))
        angles = cos.expand(len(x), -1), sin.expand(len(x), -1)
        return qk_norm_rotary(x_RHD, weight[:48], EPS, *angles).flatten(1)

    return {
        "rms_norm": (96, lambda x: norm.rms_norm(x, weight, EPS)),
        "add_rms_norm": (96, lambda x: norm.add_rms_norm(x, x.flip(1), residual_weight, EPS)[1]),
        "qk_norm_rotary": (96, heads),
        "silu_mul": (96, lambda x: rowwise.silu_mul(x, x.flip(1))),
    }


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "qk_norm_rotary", "silu_mul"])
def test_row_law(name: str) -> None:
    width, run_op = _subjects()[name]
    assert row_law_holds(run_op, normal(5, width))


@triton.jit
def by_row_count_kernel(x_ptr, out_ptr, rows, WIDTH: tl.constexpr):
    """RMSNorm made to break the law: it sums in as many parts as there are rows."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * WIDTH + column)
    total = 0.0
    for part in range(rows):
        total += tl.sum(tl.where(column % rows == part, x * x, 0.0), axis=0)
    tl.store(out_ptr + row * WIDTH + column, x / tl.sqrt(total / WIDTH))


def test_the_control_is_found() -> None:
    config = row_config(by_row_count_kernel, "control", torch.float32, "x_ptr out_ptr", "rows:i32", {"WIDTH": 128})

    def control(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        run(config, (len(x),), x.contiguous(), out, len(x))
        return out

    assert not row_law_holds(control, normal(5, 128))


def test_gradients_against_float64() -> None:
    x, weight, residual = normal(130, 40), 1 + normal(40) / 8, normal(130, 40, seed=5)

    def exact(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, total / (total.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight

    ours = gradients(lambda a, b, w: norm.add_rms_norm(a, b, w, EPS), x, residual, weight)
    true = gradients(exact, x.double(), residual.double(), weight.double())
    assert max(relative_error(a, b) for a, b in zip(ours, true, strict=True)) < 3e-6

    gate, up = 4 * normal(3, 70), normal(3, 70, seed=1)
    ours = gradients(rowwise.silu_mul, gate, up)
    true = gradients(lambda g, u: torch.nn.functional.silu(g) * u, gate.double(), up.double())
    assert max(relative_error(a, b) for a, b in zip(ours, true, strict=True)) < 3e-6


def test_gradient_of_heads_against_float64() -> None:
    x, weight, angle = normal(4, 2, 48), 1 + normal(48) / 8, normal(4, 24)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        y = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight
        first, second = y.chunk(2, -1)
        cos, sin = angle.double().cos().unsqueeze(1), angle.double().sin().unsqueeze(1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    ours = gradients(lambda a, w: qk_norm_rotary(a, w, EPS, angle.cos(), angle.sin()), x, weight)
    true = gradients(exact, x.double(), weight.double())
    assert max(relative_error(a, b) for a, b in zip(ours, true, strict=True)) < 3e-6


def test_embedding_gradient_adds_rows_in_order() -> None:
    ids = torch.tensor([3, 1, 3, 0, 9, 3, 1], device=DEVICE)
    weight, upstream = normal(10, 200), normal(7, 200) * torch.logspace(-4, 4, 7, device=DEVICE).unsqueeze(1)
    leaf = weight.clone().requires_grad_()
    out = rowwise.embedding(ids, leaf)
    assert same(out, weight[ids])
    (grad,) = torch.autograd.grad(out, leaf, upstream)
    expected = torch.zeros(10, 200)
    for row, token in enumerate(ids.tolist()):
        expected[token] += upstream[row].cpu()
    assert same(grad, expected)
    backwards = torch.zeros(10, 200).index_add_(0, ids.cpu().flip(0), upstream.cpu().flip(0))
    assert not same(grad, backwards), "these values cannot tell one order from another"


def test_weight_gradient_repeats_over_many_rows() -> None:
    x, weight = normal(300, 24), 1 + normal(24) / 8
    first, second = (gradients(lambda a, w: norm.rms_norm(a, w, EPS), x, weight) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    sums = norm.column_sums(x)
    assert relative_error(sums, x.double().sum(0)) < 1e-6
    assert bits(sums).shape == (24,)
