"""Every metric of a run: name, unit, exact definition; nothing else may be written. docs/metrics.md comes from it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """What one number is."""

    unit: str
    definition: str


_CLIPPED = "share of trained tokens whose loss has no gradient because the probability ratio (new / old) is"

METRICS: dict[str, Metric] = {
    "gap/tokens_compared": Metric(
        "tokens", "tokens whose log-prob is known from both sides and was compared bit for bit"
    ),
    "gap/tokens_different": Metric(
        "tokens", "compared tokens whose two float32 words differ, non-finite ones included"
    ),
    "gap/tokens_nonfinite": Metric("tokens", "compared tokens of which at least one side is NaN or infinite"),
    "gap/tokens_not_compared": Metric(
        "tokens",
        "generated tokens that were not compared: those of dropped groups and of turns that are not trained on",
    ),
    "gap/mean": Metric("nats", "mean of abs(d) over the compared tokens; NaN if any is non-finite"),
    "gap/max": Metric("nats", "largest abs(d) over the compared tokens; NaN if any is non-finite"),
    "train/train_rollout_logprob_abs_diff": Metric(
        "nats", "the same as gap/mean, under the name that Miles and slime log"
    ),
    "train/loss": Metric("-", "the loss, aggregated as train.aggregation says, mean over the step's updates"),
    "train/entropy": Metric(
        "nats", "mean entropy of the distribution that trained tokens were sampled from, trainer side"
    ),
    "train/clip_share_low": Metric("share", f"{_CLIPPED} below 1 - train.clip_low"),
    "train/clip_share_high": Metric("share", f"{_CLIPPED} above 1 + train.clip_high"),
    "train/ratio_mean": Metric("-", "mean probability ratio (new / old) over the trained tokens"),
    "train/ratio_max": Metric("-", "largest probability ratio (new / old) over the trained tokens"),
    "train/kl_k1": Metric("nats", "mean of log(old / new): unbiased estimate of KL(old, new)"),
    "train/kl_k3": Metric("nats", "mean of ratio - 1 - log(ratio): estimate of KL(old, new), never negative"),
    "train/grad_norm": Metric("-", "L2 norm of all gradients before clipping, mean over the step's updates"),
    "train/learning_rate": Metric("-", "learning rate of the step's last update"),
    "train/tokens": Metric("tokens", "tokens with a loss"),
    "reward/mean": Metric("-", "mean reward of the step's completions"),
    "reward/std": Metric("-", "standard deviation (population) of the step's rewards"),
    "reward/min": Metric("-", "smallest reward of the step"),
    "reward/max": Metric("-", "largest reward of the step"),
    "reward/raised": Metric("calls", "reward calls that raised an exception; they count as reward.on_error"),
    "reward/timed_out": Metric("calls", "reward calls over reward.time_limit_s; they count as reward.on_error"),
    "reward/not_finite": Metric("calls", "reward calls that returned no finite number; they count as reward.on_error"),
    "reward/died": Metric("calls", "reward calls whose worker process ended; they count as reward.on_error"),
    "eval/accuracy": Metric("share", "share of held-out completions with a reward of at least 1"),
    "eval/reward": Metric("-", "mean reward of the held-out completions"),
    "eval/response_length/mean": Metric("tokens", "mean length of the held-out completions"),
    "eval/truncated_share": Metric("share", "share of held-out completions that reached their token limit"),
    "rollout/response_length/mean": Metric("tokens", "mean generated tokens per completion"),
    "rollout/response_length/max": Metric("tokens", "most generated tokens of a completion"),
    "rollout/truncated_share": Metric("share", "share of completions that ended at a token limit, not at a stop"),
    "rollout/groups_without_variance": Metric(
        "groups", "prompts whose completions all have the same reward: no gradient"
    ),
    "rollout/cached_tokens": Metric("tokens", "prompt tokens whose KV came from the prefix cache"),
    "time/rollout_s": Metric("s", "wall time of generation, during which ended completions are judged already"),
    "time/reward_s": Metric("s", "wall time of waiting for rewards after the last completion"),
    "time/train_s": Metric("s", "wall time of forward, comparison, backward and update"),
    "time/sync_s": Metric("s", "wall time of copying the weights into the engine"),
    "time/eval_s": Metric("s", "wall time of the held-out evaluation"),
    "time/checkpoint_s": Metric("s", "wall time of writing the checkpoint after the step before"),
    "time/step_s": Metric("s", "wall time of the whole step, without its checkpoint"),
    "perf/generated_tokens_per_s": Metric("tokens/s", "generated tokens divided by time/rollout_s"),
    "perf/trained_tokens_per_s": Metric(
        "tokens/s", "trained tokens and their prompts, which count for each sample, divided by time/train_s"
    ),
}
