"""Asks a running engine over HTTP what it does: is it deterministic, and what do its log-probs mean (no torch)."""
