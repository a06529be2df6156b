"""The side of vLLM's CPU build, in this process: python vllm_side.py MODEL_FOLDER."""

from __future__ import annotations

import os
import sys

# One process, so that stopping it stops all of it; both cores, where the default keeps one for a server.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
cores = sorted(os.sched_getaffinity(0))[:threads]
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))

from jsonlines import Answer, prompts, serve, take_stdout, timed  # noqa: E402


def main(folder: str) -> None:
    channel = take_stdout()
    import torch
    import vllm

    engine = vllm.LLM(folder, dtype="float32", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False, seed=0)
    vocabulary = engine.llm_engine.model_config.get_vocab_size()

    def generate(sequences: int, prompt_tokens: int, new_tokens: int, seed: int, logprobs: bool = True) -> Answer:
        asked = [{"prompt_token_ids": ids} for ids in prompts(sequences, prompt_tokens, vocabulary, seed)]
        params = vllm.SamplingParams(
            temperature=1.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0 if logprobs else None,  # 0: the sampled token's alone
            detokenize=False,
        )
        answer: Answer = {"tokens": sequences * new_tokens}
        with timed(answer):
            done = engine.generate(asked, params, use_tqdm=False)
        assert sum(len(one.outputs[0].token_ids) for one in done) == answer["tokens"]
        assert not logprobs or all(one.outputs[0].logprobs for one in done)
        return answer

    serve(channel, {"generate": generate}, {"vllm": vllm.__version__, "torch": torch.__version__, "threads": threads})


if __name__ == "__main__":
    main(sys.argv[1])
