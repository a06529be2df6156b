"""Scoring sampled tokens with our trainer's forward and with Hugging Face's. The only part of the probe with torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerogap.probe.limits import BadAnswerError
from zerogap.probe.sampled import Floats, Sampled
from zerogap.threads import prepare_environment


def score_ours(model: Path, sampled: Sequence[Sampled]) -> list[Floats]:
    """Return float32 log-probs [T] of each sequence by the trainer's own scoring."""
    prepare_environment()
    import torch

    from zerogap.models.weights import load_decoder
    from zerogap.trainer.sample import TrainSequence
    from zerogap.trainer.scoring import score

    decoder = load_decoder(model)
    _check_vocabulary(sampled, decoder.config.vocab_size)
    sequences = [
        TrainSequence(
            (0, number, 0),
            [*item.prompt, *item.tokens],
            len(item.prompt),
            torch.from_numpy(item.logprob_T.copy()),
            torch.ones(len(item.tokens), dtype=torch.bool),
            0.0,
            0,
        )
        for number, item in enumerate(sampled)
    ]
    return [found.logprob_T.numpy() for found in score(decoder, sequences)]


def score_hf(model: Path, sampled: Sequence[Sampled]) -> list[Floats]:
    """Return float32 log-probs [T] of each sequence by the transformers library's forward in float32."""
    prepare_environment()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_pretrained(
        str(model), dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    _check_vocabulary(sampled, network.config.vocab_size)
    found: list[Floats] = []
    with torch.no_grad():
        for item in sampled:
            ids = torch.tensor([[*item.prompt, *item.tokens]])
            logits = network(ids).logits[0, len(item.prompt) - 1 : -1].float()
            values = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(item.tokens)[:, None])[:, 0]
            found.append(values.numpy().astype(np.float32))
    return found


def _check_vocabulary(sampled: Sequence[Sampled], size: int) -> None:
    most = max(max(*item.prompt, *item.tokens) for item in sampled)
    if most >= size:
        raise BadAnswerError(f"the engine uses token id {most}; the given model has {size}: it is another model")
