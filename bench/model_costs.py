"""Bytes and operations that a forward of a decoder cannot do without, for the roofline of each row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from machine import Machine
from zerogap.models.config import ModelConfig


@dataclass(frozen=True)
class Costs:
    """Sizes of one model.

    Attributes:
        vocabulary: token ids.
        layer_weights: matrix elements of all layers.
        head_weights: elements of the LM head.
        kv_floats: elements of keys and values of one position, all layers.
        attention_flops: operations of one row against one key, all layers.
    """

    vocabulary: int
    layer_weights: int
    head_weights: int
    kv_floats: int
    attention_flops: int

    @staticmethod
    def of(folder: Path) -> Costs:
        shape = ModelConfig.from_folder(folder)
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
        return Costs(
            shape.vocab_size,
            shape.num_layers * layer,
            shape.vocab_size * shape.hidden_size,
            2 * shape.num_layers * keys,
            4 * shape.num_layers * queries,
        )

    def decode_bytes(self, contexts: list[int], weight_bytes: int = 4) -> int:
        """Return the bytes that one decode step reads: all matrices once, and every sequence's keys and values."""
        return (self.layer_weights + self.head_weights) * weight_bytes + 4 * self.kv_floats * sum(contexts)

    def decode_flops(self, contexts: list[int]) -> int:
        return 2 * (self.layer_weights + self.head_weights) * len(contexts) + self.attention_flops * sum(contexts)

    def prefill_flops(self, sequences: int, length: int) -> int:
        """Return the operations of computing prompts, of which only the last row meets the LM head."""
        rows = 2 * self.layer_weights * length + self.attention_flops * length * (length + 1) // 2
        return sequences * (rows + 2 * self.head_weights)

    def rollout_floor(
        self, machine: Machine, sequences: int, prompt: int, new_tokens: int, weight_bytes: int = 4
    ) -> float:
        """Return the least seconds of prompts and decode steps: each step at the nearer of the two roofs."""
        weights = (self.layer_weights + self.head_weights) * weight_bytes
        seconds = machine.floor(weights, self.prefill_flops(sequences, prompt))
        for made in range(1, new_tokens):  # the first token comes from the prompt's last row
            contexts = [prompt + made] * sequences
            seconds += machine.floor(self.decode_bytes(contexts, weight_bytes), self.decode_flops(contexts))
        return seconds

    def train_flops(self, sequences: int, length: int) -> int:
        """Return the operations of a forward and a backward, which is two forwards, with every row scored."""
        rows = 2 * (self.layer_weights + self.head_weights) * length
        return 3 * sequences * (rows + self.attention_flops * length * (length + 1) // 2)
