"""The side of Hugging Face transformers: python hf_side.py MODEL_FOLDER."""

from __future__ import annotations

import sys

import torch
import transformers
from jsonlines import Answer, prompts, serve, take_stdout, timed


def main(folder: str) -> None:
    channel = take_stdout()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    vocabulary = model.config.vocab_size

    def generate(sequences: int, prompt_tokens: int, new_tokens: int, seed: int, logprobs: bool = True) -> Answer:
        ids = torch.tensor(prompts(sequences, prompt_tokens, vocabulary, seed))
        answer: Answer = {"tokens": sequences * new_tokens}
        with timed(answer), torch.inference_mode():
            done = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_logits=logprobs,
            )
            if logprobs:
                drawn = done.sequences[:, prompt_tokens:]
                for place, logits in enumerate(done.logits):
                    torch.log_softmax(logits, -1).gather(1, drawn[:, place : place + 1])
        assert done.sequences.shape[1] == prompt_tokens + new_tokens
        return answer

    def train(sequences: int, length: int, seed: int) -> Answer:
        tokens = torch.tensor(prompts(sequences, length, vocabulary, seed))
        answer: Answer = {"tokens": sequences * length}
        with timed(answer):
            logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
            targets = tokens[:, 1:].flatten()
            # The fused cross-entropy is the fastest way to a log-prob per token that torch has.
            torch.nn.functional.cross_entropy(logits, targets, reduction="none").mean().backward()
        model.zero_grad()
        return answer

    about = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    serve(channel, {"generate": generate, "train": train}, about)


if __name__ == "__main__":
    main(sys.argv[1])
