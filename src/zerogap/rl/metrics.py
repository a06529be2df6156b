"""Writes a run's metrics: ``metrics.jsonl`` and TensorBoard event files (without torch or TensorFlow)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from zerogap.rl.metric_names import METRICS
from zerogap.rl.records import drop_steps_from, open_to_append, to_line


class MetricsWriter:
    """One JSON object per step, on the disk when `write` returns, and the same numbers in TensorBoard."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """Open the files of a run.

        Args:
            folder: the run folder.
            first_step: the step that will be written first; what a run that was killed wrote of it and of later ones
                is removed, since it comes again.
        """
        path = folder / "metrics.jsonl"
        drop_steps_from(path, first_step)
        self._file = open_to_append(path)
        self._events: Any = EventFileWriter(str(folder / "tensorboard"))
        if first_step:
            # TensorBoard hides the events of this step and later ones that stand in older files.
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step; each name stands in `METRICS`."""
        unknown = sorted(values.keys() - METRICS.keys())
        assert not unknown, f"metrics without a definition: {unknown}"
        self._file.write(to_line({"step": step, **dict(sorted(values.items()))}))
        self._file.flush()
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
