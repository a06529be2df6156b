"""How logged lines become runs: doubled, out of order, resumed, two runs in one log, several processes."""

from __future__ import annotations

from zerogap.gap.series import Series, SeriesBuilder

GAP = "train/train_rollout_logprob_abs_diff"


def build(*lines: tuple[str, int | None, float]) -> list[Series]:
    builder = SeriesBuilder("log")
    for process, step, value in lines:
        builder.add(process, step, {GAP: value})
    return builder.build("run")


def values(series: Series) -> list[float]:
    return [float(v) for v in series.values["abs_mean"]]


def test_doubled_lines_count_once() -> None:
    (series,) = build(("", 0, 0.1), ("", 0, 0.1), ("", 1, 0.2), ("", 1, 0.2))
    assert values(series) == [0.1, 0.2]
    assert "2 doubled lines" in " ".join(series.notes)


def test_steps_out_of_order_are_sorted() -> None:
    (series,) = build(("", 0, 0.1), ("", 2, 0.3), ("", 1, 0.2), ("", 3, 0.4))
    assert values(series) == [0.1, 0.2, 0.3, 0.4]
    assert not series.restarts


def test_a_resume_replaces_what_was_thrown_away() -> None:
    (series,) = build(*[("", s, (10 + s) / 100) for s in range(6)], ("", 3, 0.9), ("", 4, 0.14), ("", 5, 0.16))
    assert values(series) == [0.1, 0.11, 0.12, 0.9, 0.14, 0.16]
    assert series.restarts == [3]


def test_two_runs_in_one_log_stay_apart() -> None:
    made = build(("", 0, 0.1), ("", 1, 0.2), ("", 2, 0.3), ("", 0, 0.5), ("", 1, 0.6))
    assert [values(s) for s in made] == [[0.1, 0.2, 0.3], [0.5, 0.6]]
    assert [s.label for s in made] == ["run#1", "run#2"]


def test_processes_that_contradict_each_other_are_two_runs_and_others_one() -> None:
    made = build(("A pid=1", 0, 0.1), ("A pid=2", 0, 0.5), ("A pid=1", 1, 0.2), ("A pid=2", 1, 0.6))
    assert [values(s) for s in made] == [[0.1, 0.2], [0.5, 0.6]]
    builder = SeriesBuilder("log")
    builder.add("A", 0, {GAP: 0.1})
    builder.add("B", 0, {"rollout/raw_reward": 0.5})
    (series,) = builder.build("run")
    assert float(series.values["reward"][0]) == 0.5


def test_two_interleaved_runs_without_a_prefix_are_told_apart() -> None:
    made = build(*[("", s, v) for s in range(4) for v in (0.1 + s / 100, 0.5 + s / 100)])
    assert sorted(values(s)[0] for s in made) == [0.1, 0.5]
    assert all(len(s) == 4 for s in made)


def test_lines_without_a_step_are_counted() -> None:
    (series,) = build(("", None, 0.1), ("", None, 0.2))
    assert series.steps.tolist() == [0, 1]


def test_two_names_of_one_quantity_are_not_mixed() -> None:
    builder = SeriesBuilder("log")
    builder.add("", 0, {GAP: 0.1, "logprob_diff/mean": 9.0})
    (series,) = builder.build("run")
    assert values(series) == [0.1]
    assert series.names["abs_mean"] == GAP
