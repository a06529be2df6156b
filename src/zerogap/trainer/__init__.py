"""The trainer: advantages, losses, packing, one optimiser update, checkpoints."""

from zerogap.trainer.advantages import GroupAdvantages, group_advantages
from zerogap.trainer.checkpoint import (
    Checkpoint,
    RunState,
    checkpoints,
    latest,
    load_weights,
    numerics_differences,
    open_checkpoint,
    restore_optimiser,
    save_checkpoint,
)
from zerogap.trainer.losses import LossSettings
from zerogap.trainer.optimiser import Optimiser, OptimiserSettings, UpdateStats
from zerogap.trainer.packing import micro_batch, mini_batches, pack
from zerogap.trainer.sample import SequenceSampler, TrainSequence, suppressed_below
from zerogap.trainer.scoring import Scored, score
from zerogap.trainer.step import StepResult, StepSettings, accumulate, with_gradient, without_gradient

__all__ = [
    "Checkpoint",
    "GroupAdvantages",
    "LossSettings",
    "Optimiser",
    "OptimiserSettings",
    "RunState",
    "Scored",
    "SequenceSampler",
    "StepResult",
    "StepSettings",
    "TrainSequence",
    "UpdateStats",
    "accumulate",
    "checkpoints",
    "group_advantages",
    "latest",
    "load_weights",
    "micro_batch",
    "mini_batches",
    "numerics_differences",
    "open_checkpoint",
    "pack",
    "restore_optimiser",
    "save_checkpoint",
    "score",
    "suppressed_below",
    "with_gradient",
    "without_gradient",
]
