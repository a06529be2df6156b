"""Every public report of area `watch` with the answer wanted, through the same code that `zerogap watch` runs."""

import os
import tomllib
from datetime import datetime
from pathlib import Path

import pytest

from zerogap.watchdog import judge
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.events import Activity, Exit, Probe
from zerogap.watchdog.lint import lint
from zerogap.watchdog.probes import choose_probe
from zerogap.watchdog.review import review_logs
from zerogap.watchdog.rules import load_rules
from zerogap.watchdog.scan import Scanner
from zerogap.watchdog.seen import Seen

CASES = tomllib.loads((Path(__file__).parent / "watch.toml").read_text())["case"]
IDS = [case["id"] for case in CASES]
BOOK = load_rules()
URL = "http://127.0.0.1:30000"


def feed(seen, scanner, source, lines, at):
    for line in lines:
        at += 1e-3
        for raw in scanner.feed(source, f"{line}\n".encode()):
            for hit in scanner.match(source, raw, at):
                seen.hit(hit)
    for hit in scanner.flush(source, at):
        seen.hit(hit)
    return at


def live(case, start=1_000_000.0):
    """Feed a case as a run that is watched while it happens, and look at it `after_s` later."""
    seen, scanner = Seen(BOOK, start, Budgets(), processes=True), Scanner(BOOK)
    at = start + 1
    for event in sorted(case.get("events", ()), key=lambda event: event["at"]):
        if event["at"] <= 0:
            observe(seen, event, at)
    for source, lines in case["logs"].items():
        at = feed(seen, scanner, source, lines, at)
    for event in case.get("events", ()):
        if event["at"] > 0:
            observe(seen, event, at)
    now = at + case.get("after_s", 0)
    if seen.activity is None:
        seen.active_sample(Activity(at, 0.0))
    return judge.check(seen, now), seen


def observe(seen, event, start):
    at = start + event["at"]
    if event["kind"] == "probe":
        seen.probe(Probe(at, URL, event["level"], event.get("ok", False), event.get("detail", "")))
    else:
        seen.exit(Exit(at, event["pid"], event["name"], event["role"], event["status"], age_s=100.0))


def answer(case, folder):
    if "after_s" in case:
        return live(case)
    logs = []
    for source, lines in case["logs"].items():
        path = folder / f"{source}.log"
        path.write_text("".join(f"{line}\n" for line in lines))
        logs.append((source, path))
    verdict, seen, _ = review_logs(logs)
    return verdict, seen


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_case(case, tmp_path):
    verdict, seen = answer(case, tmp_path)
    wanted = case["wanted"]
    if not wanted["verdict"]:
        assert verdict is None
    else:
        assert verdict is not None
        assert verdict.name == wanted["verdict"], verdict
        assert verdict.cause == wanted.get("cause", verdict.cause), verdict
        assert verdict.phase == wanted.get("phase", verdict.phase)
        said = " ".join([verdict.summary, *(item.text for item in verdict.evidence)])
        assert wanted.get("says", "") in said, said
        assert wanted.get("hint", "") in verdict.hint
        assert list(verdict.circle) == wanted.get("circle", list(verdict.circle))
        assert wanted.get("victim", "") in " ".join(verdict.victims)
        for side, text in wanted.get("sides", {}).items():
            assert text in verdict.sides[side]
    if "notice" in wanted:
        assert wanted["notice"] in " ".join(hit.summary() for hit in seen.notices.values())
    if "symptom" in wanted:
        hit = next(hit for hit in seen.symptoms if hit.rule.id == wanted["symptom"])
        assert wanted["says"] in hit.rule.hint
    if "lint" in wanted:
        assert any(warning.startswith(wanted["lint"]) for warning in lint(case["argv"]))
    if "probe" in wanted:
        assert choose_probe("sglang", seen.info["sglang_version"]) == wanted["probe"]


@pytest.mark.parametrize("case", [case for case in CASES if case["wanted"].get("cause")], ids=lambda case: case["id"])
def test_without_its_lines_a_case_has_no_cause(case):
    """The control: the same silence without the lines names no cause."""
    bare = {**case, "logs": {}, "events": [], "after_s": 30}
    assert live(bare)[0] is None


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_lines_alone_never_stop_a_run_that_works(case):
    """The same lines in a run that goes on working (a model may have written them): no verdict."""
    seen, scanner = Seen(BOOK, 1_000_000.0, Budgets(), processes=True), Scanner(BOOK)
    at = 1_000_000.0
    for step in range(5):
        at = feed(
            seen, scanner, "run", [f"step {step}: {{'train/loss': 0.{step + 1}, 'train/grad_norm': 1.0}}"], at + 30
        )
        seen.active_sample(Activity(at, 1.0))
        if case["id"] == "R028":
            continue  # a metric line is itself the evidence
        for source, lines in case["logs"].items():
            feed(seen, scanner, source, [line for line in lines if "phase=" not in line], at)
        feed(seen, scanner, "run", ["Decode batch. #running-req: 12, #token: 4096"], at + 1)
        assert judge.check(seen, at + 20) is None


@pytest.mark.parametrize("hour", range(0, 24, 1))
def test_the_hour_of_the_review_does_not_matter(hour, tmp_path):
    """Stamps without a date go forward, whenever the file was written and is looked at."""
    (case,) = [case for case in CASES if case["id"] == "R024"]
    path = tmp_path / "run.log"
    path.write_text("".join(f"{line}\n" for line in case["logs"]["run"]))
    at = datetime(2026, 3, 5, hour, 56).timestamp()
    os.utime(path, (at, at))
    verdict, _, _ = review_logs([("run", path)])
    assert verdict is not None
    assert (verdict.name, verdict.cause) == ("stalled", "sleep-without-wake")
