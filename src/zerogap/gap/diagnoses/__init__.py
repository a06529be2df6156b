"""Diagnoses: pure functions of a table, a series or stated facts."""

from zerogap.gap.diagnoses.base import Cause, Finding, causes

__all__ = ["Cause", "Finding", "causes"]
