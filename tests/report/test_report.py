"""The report: one file, no script, a strict policy, hostile text inert; looked at in a browser where there is one."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.browser import Browser, find
from zerogap.cli import run
from zerogap.gap.readers.text_log import LogParser
from zerogap.report.tokens import shade, token_texts

EVIL = "</span><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\u202e\"' {{ 7*7 }} hf_abcdefghijklmnop"


def make_run(folder: Path, *, broken: bool = False) -> Path:
    """A run folder with everything the report shows, in the format of `zerogap train`."""
    rng = np.random.default_rng(0)
    (folder / "samples").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(12):
            gap = 0.0 if not broken or step < 6 else 0.25
            metrics.write(
                json.dumps({"step": step, "gap/mean": gap, "gap/max": 3 * gap, "gap/tokens_different": int(1e3 * gap),
                            "gap/tokens_compared": 48, "reward/mean": step / 12, "eval/accuracy": step / 15,
                            "perf/generated_tokens_per_s": 900.0, "train/grad_norm": 0.5}) + "\n"
            )  # fmt: skip
            with (folder / "samples" / f"step-{step:06d}.jsonl").open("w") as samples:
                for number in range(4):
                    engine = (-rng.exponential(0.7, 12)).astype(np.float32)
                    trainer = np.minimum(engine + rng.normal(0, 0.3 * gap + 1e-9, 12) * bool(gap), 0).astype(np.float32)
                    samples.write(
                        json.dumps({"step": step, "sample": f"{number}.0", "prompt": f"What is {step}? {EVIL}",
                                    "completion": f"It is {step}. {EVIL}", "reward": 1.0, "prompt_ids": [1, 2],
                                    "response_ids": list(range(12)), "logprobs_engine": engine.tolist(),
                                    "logprobs_trainer": trainer.tolist(), "loss_mask": [True] * 12,
                                    "weights_version": step}) + "\n"
                    )  # fmt: skip
    (folder / "config.toml").write_text(
        f'[model]\npath = "builtin:tiny-qwen3"\n[log]\napi_key = "sk-very-secret-value"\nnote = {json.dumps(EVIL)}\n',
        encoding="utf-8",
    )
    (folder / "check.json").write_text(json.dumps({"verdict": "unknown", "why": EVIL}), encoding="utf-8")
    return folder


class Page(html.parser.HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    made = {}
    for name, broken, code in (("zero", False, 0), ("broken", True, 1)):
        source = make_run(folder / name, broken=broken)
        made[name] = folder / f"{name}.html"
        assert run(["report", str(source), "-o", str(made[name])]) == code
    return made


def test_one_file_without_script_or_outside_address(pages: dict[str, Path]) -> None:
    for path in pages.values():
        page = Page(path.read_text(encoding="utf-8"))
        kinds = {tag for tag, _ in page.tags}
        assert not kinds & {"script", "link", "iframe", "object", "embed", "form", "base", "svg"}
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
            for name in ("src", "href"):
                assert (attributes.get(name) or "data:").startswith(
                    "data:image/svg+xml;base64,"
                ) or name not in attributes
        policy = next(
            a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy is not None
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy


def test_hostile_text_is_text_and_secrets_are_gone(pages: dict[str, Path]) -> None:
    text = pages["zero"].read_text(encoding="utf-8")
    page = Page(text)
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    for bad in ("\x1b", "\u202e", "sk-very-secret-value", "hf_abcdefghijklmnop"):
        assert bad not in text


def test_what_the_report_must_show_is_there(pages: dict[str, Path]) -> None:
    page = Page(pages["broken"].read_text(encoding="utf-8"))
    alternatives = [a["alt"] or "" for t, a in page.tags if t == "img"]
    for wanted in ("Reward over steps", "Evaluation over steps", "Gap: mean abs(d) over steps", "Gap: max abs(d) "
        "over steps",
                   "Gap: tokens that differ over steps", "Throughput over steps", "Engine log-probs against trainer",
                   "Mean gap by position", "Mean gap by probability", "Mean gap of each sample"):  # fmt: skip
        assert any(wanted in alt for alt in alternatives), wanted
    for wanted in ("Diagnoses", "Check", "Configuration and machine", "Sample rollouts", "Would confirm it"):
        assert wanted in page.text
    first = page.text.index("fault")
    assert first < page.text.index("Diagnoses")  # the verdict comes first
    classes = {a.get("class") for t, a in page.tags if t == "span"}
    assert {"t g3", "t g0"} & classes


def test_the_stored_check_is_a_table_and_another_form_is_shown_as_it_is(tmp_path: Path) -> None:
    from zerogap.report.check import machine_facts, read_check

    requirement = {"name": "backend", "status": "no", "expected": "cpu", "observed": EVIL}
    body = {"verdict": "no", "decisive": ["zerogap/exact"], "notes": ["a note"],
            "contracts": [{"name": "zerogap/exact", "verdict": "no", "requirements": [requirement]}],
            "facts": {"host.os": {"value": "Linux", "source": "uname"},
                      "gpu": {"value": "absent", "source": "none"}}}  # fmt: skip
    (tmp_path / "check.json").write_text(json.dumps(body), encoding="utf-8")
    check = read_check(tmp_path)
    assert check is not None
    assert (check.verdict, check.level, check.rows[0][:4]) == ("no", "fault", ("backend", "no", "fault", "cpu"))
    assert "\x1b" not in check.rows[0][4]
    assert machine_facts(tmp_path) == "host.os = Linux  (uname)"
    for text in ("{}", "[1]", "not json", '{"verdict": 3}'):
        (tmp_path / "check.json").write_text(text, encoding="utf-8")
        assert read_check(tmp_path).raw  # type: ignore[union-attr]
    assert read_check(tmp_path / "none") is None


def test_any_source_of_gap_makes_a_report(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "".join(f"step {n}: {{'train/train_rollout_logprob_abs_diff': 0.01}}\n" for n in range(4)), encoding="utf-8"
    )
    assert run(["report", str(log), "-o", str(tmp_path / "r.html")]) == 0
    assert LogParser is not None


@pytest.mark.parametrize(("target", "said"), [("", "is a folder"), ("no/such/r.html", "does not exist")])
def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, said: str
) -> None:
    source = make_run(tmp_path / "run")
    assert run(["report", str(source), "-o", str(tmp_path / target)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_plots_are_written_whole(tmp_path: Path) -> None:
    source = make_run(tmp_path / "run", broken=True)
    for name, magic in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        assert run(["gap", str(source), "--plot", str(tmp_path / name)]) == 1
        assert (tmp_path / name).read_bytes().startswith(magic)


def test_token_texts_come_from_the_tokenizer_alone() -> None:
    texts = token_texts("builtin:tiny-qwen3")
    assert "+" in texts.values()
    assert token_texts("/no/such/model") == {}
    assert [shade(0.0, d) for d in (0.0, -1e-8, -0.005, -0.02, -0.1, -0.5, -3.0)] == [0, 1, 1, 2, 3, 4, 5]
    assert shade(float("nan"), 0.0) is None


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find()
    if executable is None:
        pytest.skip("no Chromium here (apt-get install chromium)")
    made = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["zero", "broken"])
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1100, False)])
def test_it_opens_without_error_missing_image_or_sideways_scroll(
    pages: dict[str, Path], browser: Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    browser.problems.clear()
    browser.open(pages[name].as_uri(), width, dark=dark)
    assert browser.problems == []
    images: list[Any] = browser.value("[...document.images].map(i => i.naturalWidth)")
    assert len(images) >= 9
    assert min(images) > 0
    assert browser.value("document.documentElement.scrollWidth") <= width
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 19, 22)") == dark  # the style passed the policy
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert browser.value("document.title").startswith("zerogap: ")


def test_the_browser_test_can_fail(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><div style='width:900px'>x</div>"
        "<script>alert(1)</script><img src='missing.png'>",
        encoding="utf-8",
    )
    browser.problems.clear()
    browser.open(page.as_uri(), 390)
    assert browser.problems
    assert 0 in browser.value("[...document.images].map(i => i.naturalWidth)")
