"""The rollout engine: scheduler, paged KV memory with prefix cache, sampler.

Its log-probs are those the trainer computes, bit for bit, whatever ran together (design, law 1): what is scheduled
when has no influence on any row.
"""

from zerogap.engine.config import EngineConfig
from zerogap.engine.engine import Engine, EngineStatistics
from zerogap.engine.params import Key, Request, SamplingParams, suppressed_ids
from zerogap.engine.sequence import Completion, TokenEvent
from zerogap.engine.trace import ReplayedStep, ScheduleTrace, Span, StepTrace, replay

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStatistics",
    "Key",
    "ReplayedStep",
    "Request",
    "SamplingParams",
    "ScheduleTrace",
    "Span",
    "StepTrace",
    "TokenEvent",
    "replay",
    "suppressed_ids",
]
