"""Times on a device: graphs replayed over cold memory on a GPU, the wall clock on a CPU (there they prove nothing)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zerogap.engine import Engine, EngineConfig, Request, SamplingParams
from zerogap.models.decoder import Decoder
from zerogap.models.tokenizer import Tokenizer

_WINDOW = 0.03  # seconds of device work behind one figure
SEQUENCES = (1, 16, 64)  # of the decode table


def seconds(call: Callable[[], object], device: str) -> float:
    """Return how long a call takes on the device: the best of three windows, without host time where a graph can be."""
    call()
    call()
    if device == "cpu":
        return min(_wall(call) for _ in range(3))
    torch.cuda.synchronize(device)
    replay = _captured(call, device)
    repeats = max(1, min(1000, int(_WINDOW / max(_events(replay, 1, device), 1e-6))))
    return min(_events(replay, repeats, device) for _ in range(3))


def _captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """Return the replay of a graph of the call, or the call itself if it cannot be captured."""
    try:
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        graph.replay()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        print(f"no graph ({str(error).splitlines()[0][:100]}): host time is part of the figure", flush=True)
        torch.cuda.synchronize(device)
        return call
    return graph.replay


def _events(call: Callable[[], object], repeats: int, device: str) -> float:
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(repeats):
            call()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1000 / repeats


def _wall(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def copy_bandwidth(device: str, dry: bool) -> float:
    """Return bytes per second, read and written, of a large copy: what memory gives in practice."""
    source = torch.empty(2**20 if dry else 2**31, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: goal.copy_(source), device)


def cold_weights(out_features: int, in_features: int, dtype: torch.dtype, device: str, dry: bool) -> list[Tensor]:
    """Return so many copies of a weight that walking through them leaves none in the GPU's cache."""
    copies = 1
    if device != "cpu":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        copies = max(1, -(-3 * cache // (out_features * in_features * dtype.itemsize)))
    size = (out_features, in_features)
    return [torch.randn(size, device=device, dtype=dtype) * in_features**-0.5 for _ in range(1 if dry else copies)]


def tokens_per_second(decoder: Decoder, tokenizer: Tokenizer, sequences: int, dry: bool) -> float:
    """Return the engine's generated tokens per second of its own forwards, prompts included, after a short warm-up."""
    prompt, new = (8, 4) if dry else (128, 64)
    engine = Engine(decoder, tokenizer, EngineConfig(num_pages=sequences * (-(-(prompt + new) // 16) + 1)))
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    vocabulary = decoder.config.vocab_size
    for turn, most in ((0, 2), (1, new)):
        prompts = [tuple((7 * i + j) % vocabulary for j in range(prompt)) for i in range(sequences)]
        limited = replace(params, max_tokens=most)
        requests = [Request((turn, 0, i), tokens, limited) for i, tokens in enumerate(prompts)]
        began = time.perf_counter()
        engine.generate(requests)
        took = time.perf_counter() - began
    return sequences * new / took
