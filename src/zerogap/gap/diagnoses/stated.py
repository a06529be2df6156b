"""Diagnoses from stated facts alone; the rules stand by subject in the ``stated_*`` modules."""

from __future__ import annotations

from zerogap.gap.diagnoses.base import Finding
from zerogap.gap.diagnoses.stated_inputs import INPUT_RULES
from zerogap.gap.diagnoses.stated_numerics import NUMERICS_RULES
from zerogap.gap.diagnoses.stated_sampler import SAMPLER_RULES
from zerogap.gap.diagnoses.stated_sync import SYNC_RULES
from zerogap.gap.facts import Facts

RULES = (*SAMPLER_RULES, *INPUT_RULES, *NUMERICS_RULES, *SYNC_RULES)


def diagnose_facts(facts: Facts) -> list[Finding]:
    """Return what the stated facts alone say."""
    if not facts.values and not facts.text:
        return []
    return [found for rule in RULES if (found := rule(facts)) is not None]
