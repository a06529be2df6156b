"""Readers of other programs' logs, dumps and runs, found by what a file holds and never by its name."""

from zerogap.gap.readers.load import load
from zerogap.gap.readers.loaded import Loaded

__all__ = ["Loaded", "load"]
