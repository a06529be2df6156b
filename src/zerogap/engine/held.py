"""Weights as the engine holds them: whether they changed, and whether new ones fit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zerogap.errors import UsageError


def change_counts(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return per weight what differs after it was changed: torch's count of its changes, and where it lies."""
    return {name: (weight._version, weight.data_ptr()) for name, weight in weights.items()}


def check_state_dict(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse weights that do not fit.

    Raises:
        UsageError: a name is missing or unknown, or a shape or type differs.
    """
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown:
        kind, names = ("lack", missing) if missing else ("hold unknown", unknown)
        raise UsageError(f"load_weights: the weights {kind} {names[0]!r} and {len(names) - 1} more names")
    for name, weight in own.items():
        new = given[name]
        if new.shape != weight.shape or new.dtype != weight.dtype:
            raise UsageError(
                f"load_weights: {name!r} is {new.dtype} {tuple(new.shape)}, the model has {weight.dtype}"
                f" {tuple(weight.shape)}"
            )
