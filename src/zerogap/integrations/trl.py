"""``GapCallback`` for TRL's GRPOTrainer: the gap of every trained token, judged while the run goes on.

    callback = GapCallback(output="gap.parquet")
    trainer = GRPOTrainer(..., callbacks=[callback])
    callback.attach(trainer)      # per-token log-probs of both sides; without it only TRL's averages are judged
    trainer.train()
    print(callback.report())

``attach`` reads what TRL already computes: the log-probs that came with the rollout (vLLM, or a ``rollout_func``) and
those of the trainer's own forward at the weights that sampled. It adds no forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from zerogap.console import message
from zerogap.errors import UsageError
from zerogap.gap import GapReport, Recorder
from zerogap.gap.judge import Options, Verdict, judge
from zerogap.gap.readers import Loaded
from zerogap.gap.readers.text_log import flatten
from zerogap.gap.series import SeriesBuilder

_SCORES = "_get_per_token_logps_and_entropies"
_LOSS = "_compute_loss"


class GapCallback(TrainerCallback):
    """Records the log-prob gap of a TRL run, logs it, and may stop the run on a fault.

    Args:
        output: where the table is written at the end (.parquet or .jsonl); None = not written.
        gpu, model, baseline: choose the healthy range, as in ``zerogap gap``.
        contract: name of the bit-exact contract that should hold, if one does.
        stop: end training at the first step with a fault.
    """

    def __init__(
        self, output: str | Path | None = None, *, gpu: str | None = None, model: str | None = None,
        baseline: str | None = None, contract: str | None = None, stop: bool = False,
    ) -> None:  # fmt: skip
        self.recorder = Recorder()
        self.steps: list[GapReport] = []
        self._output = Path(output) if output is not None else None
        self._options = Options(gpu, model, baseline, contract)
        self._stop = stop
        self._logged = SeriesBuilder("trl")
        self._newest: GapReport | None = None
        self._attached = False
        self._warned = False
        if self._output is not None and not self._output.absolute().parent.is_dir():
            raise UsageError(f"GapCallback: the folder of {self._output} does not exist; make it first")

    def attach(self, trainer: Any) -> GapCallback:
        """Read per-token log-probs from a GRPOTrainer; call it once, before ``train``.

        Raises:
            UsageError: the trainer is of another kind or version.
        """
        if not (hasattr(trainer, _SCORES) and hasattr(trainer, _LOSS)):
            raise UsageError(
                f"GapCallback.attach: {type(trainer).__name__} has no {_SCORES}; a GRPOTrainer of TRL 1.x is needed. "
                "Use zerogap.gap.Recorder in the loss instead"
            )
        scores: Callable[..., Any] = getattr(trainer, _SCORES)
        loss: Callable[..., Any] = getattr(trainer, _LOSS)
        held: dict[str, Any] = {}

        def keep_scores(*arguments: Any, **named: Any) -> Any:
            result = scores(*arguments, **named)
            held["trainer"] = result[0]
            return result

        def record(model: Any, inputs: dict[str, Any]) -> Any:
            held.pop("trainer", None)
            result = loss(model, inputs)
            if model.training:
                self._record(inputs, held.get("trainer"), int(trainer.state.global_step))
            return result

        setattr(trainer, _SCORES, keep_scores)
        setattr(trainer, _LOSS, record)
        self._attached = True
        return self

    def _record(self, inputs: dict[str, Any], current: Any, step: int) -> None:
        engine = inputs.get("sampling_per_token_logps")
        # The old log-probs belong to the weights that sampled; without them this is the first pass at those weights.
        trainer = inputs.get("old_per_token_logps")
        trainer = current if trainer is None else trainer
        if engine is None or trainer is None:
            if not self._warned:
                message("zerogap: this rollout carries no log-probs of the engine (use_vllm or a rollout_func gives "
                        "them); the gap cannot be measured")  # fmt: skip
                self._warned = True
            return
        mask = inputs["completion_mask"].bool()
        tool_mask = inputs.get("tool_mask")
        if tool_mask is not None:
            mask = mask & tool_mask.bool()
        real = inputs["completion_mask"].bool().cpu().numpy()
        rows = [np.flatnonzero(row) for row in real]

        def ragged(values: Any) -> list[Any]:
            array = values.detach().float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()
            return [array[i, keep] for i, keep in enumerate(rows)]

        self._newest = self.recorder.add(
            ragged(engine),
            ragged(trainer),
            step=step,
            mask=ragged(mask.long()),
            token_id=ragged(inputs["completion_ids"]),
        )
        self.steps.append(self._newest)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop on a fault, if asked to."""
        if self._stop and self._newest is not None and self._newest.status == "fault":
            message(f"zerogap: step {state.global_step}: {self._newest.verdict.summary}; training stops")
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the gap to what TRL logs, and keep TRL's own averages."""
        if logs is None:
            return
        if self._newest is not None and "loss" in logs:
            found = self._newest.metrics()
            logs.update(found)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(found)
        self._logged.add("", int(state.global_step), dict(flatten(logs)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the table."""
        if self._output is not None and self.recorder.tokens:
            self.recorder.write(self._output)

    def report(self) -> Verdict:
        """Judge the run so far: its tokens if attached, else TRL's averages."""
        if self.recorder.tokens:
            options = self._options
            return self.recorder.report(gpu=options.gpu, model=options.model, baseline=options.baseline,
                                        contract=options.contract).verdict  # fmt: skip
        loaded = Loaded("trl", "TRL logs", series=[s for s in self._logged.build("trl") if s.judged()])
        return judge(loaded, self._options)
