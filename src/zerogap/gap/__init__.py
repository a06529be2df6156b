"""The log-prob gap of any framework: read it, judge it, explain it. No torch here: numpy and pyarrow only."""

from zerogap.gap.api import GapReport, Recorder, compare
from zerogap.gap.diagnoses.sampler import fit_temperature, kept_mass

__all__ = ["GapReport", "Recorder", "compare", "fit_temperature", "kept_mass"]
