"""Attention for the plan that all backends share: it is laid out for the kernel once per batch."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from torch import Tensor

from zerogap.ops import plan as shared
from zerogap.ops.triton.attention import attention as attend
from zerogap.ops.triton.decode_plan import DecodePlan
from zerogap.ops.triton.plan import AttentionPlan


def attention(
    q_RHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    plan: shared.AttentionPlan | AttentionPlan | DecodePlan,
    scale: float,
) -> Tensor:
    """Return causal attention of each row over its own sequence's keys (`zerogap.ops.triton.attention.attention`).

    Args:
        q_RHD: queries [R, H, D].
        k_SGD: keys by slot [slots, G, D].
        v_SGD: values, likewise.
        plan: rows against slots, shared or already laid out for the kernel.
        scale: factor on the scores.
    """
    laid_out = _laid_out(plan) if isinstance(plan, shared.AttentionPlan) else plan
    return attend(q_RHD, k_SGD, v_SGD, cast(AttentionPlan, laid_out), scale)


@lru_cache(maxsize=8)
def _laid_out(plan: shared.AttentionPlan) -> AttentionPlan:
    return AttentionPlan.build(plan.chunks, plan.page_size)
