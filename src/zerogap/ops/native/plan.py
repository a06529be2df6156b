"""A batch's plan in the kernels' form."""

from __future__ import annotations

from typing import Any

import numpy as np

import zerogap_kernels as kernels
from zerogap.ops.plan import AttentionPlan

_ATTRIBUTE = "_native"


def native_plan(plan: AttentionPlan) -> Any:
    """Return the kernels' form of a plan; made once per plan."""
    held = plan.__dict__.get(_ATTRIBUTE)
    if held is None:
        tables, offsets = plan.tables
        first_S = np.cumsum(plan.count_S) - plan.count_S
        held = kernels.Plan(plan.start_S, plan.count_S, first_S, offsets[:-1].copy(), tables, plan.page_size)
        plan.__dict__[_ATTRIBUTE] = held
    return held
