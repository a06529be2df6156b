"""Writes a run's metrics: ``metrics.jsonl`` and TensorBoard event files (without torch or TensorFlow)."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

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
        again = first_step > 0 or any((folder / "tensorboard").glob("*tfevents*"))
        self._events = _open_events(folder / "tensorboard")
        self._add_event(file_version="brain.Event:2")
        if again:
            # TensorBoard hides the events of this step and later ones that stand in older files.
            self._add_event(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of one step; each name stands in `METRICS`."""
        unknown = sorted(values.keys() - METRICS.keys())
        assert not unknown, f"metrics without a definition: {unknown}"
        self._file.write(to_line({"step": step, **dict(sorted(values.items()))}))
        self._file.flush()
        os.fsync(self._file.fileno())
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._add_event(step=step, summary=summary)

    def close(self) -> None:
        """Close both files; what could not be written before, as on a full disk, is given up."""
        for file in (self._file, self._events):
            with contextlib.suppress(OSError):
                file.close()

    def _add_event(self, **content: Any) -> None:
        # Written here and now: TensorBoard's own writer has a thread, where a full disk ends in a traceback.
        self._events.write(Event(wall_time=time.time(), **content).SerializeToString())
        self._events.flush()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _open_events(folder: Path) -> Any:
    """Return a writer of a new TensorBoard file; newer files have later names."""
    folder.mkdir(exist_ok=True)
    name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
    return RecordWriter((folder / name).open("wb"))
