"""Rules are data: every shipped rule matches its own examples, and a wrong user file is refused in one line."""

import time

import pytest

from zerogap.errors import UsageError
from zerogap.watchdog.budgets import Budgets
from zerogap.watchdog.lines import LONGEST, parse_line
from zerogap.watchdog.metrics import parse_metrics
from zerogap.watchdog.redact import redact
from zerogap.watchdog.rules import FOLDER, KINDS, load_rules
from zerogap.watchdog.scan import Scanner
from zerogap.watchdog.seen import Seen

BOOK = load_rules()
EXAMPLES = [(rule, example) for rule in BOOK.rules for example in rule.examples]


def hits(book, *lines):
    scanner, found = Scanner(book), []
    for number, line in enumerate(lines):
        for raw in scanner.feed("x", f"{line}\n".encode()):
            found += scanner.match("x", raw, float(number))
    return found + scanner.flush("x", float(len(lines)))


@pytest.mark.parametrize(("rule", "example"), EXAMPLES, ids=lambda value: getattr(value, "id", None))
def test_examples(rule, example):
    found = hits(BOOK, example)
    assert any(hit.rule is rule for hit in found), [hit.rule.id for hit in found]
    text = next(hit for hit in found if hit.rule is rule).summary()
    assert "{" not in text.replace("{startup}", "").replace("{circle}", "") or "{" in example


@pytest.mark.parametrize("rule", BOOK.rules, ids=lambda rule: rule.id)
def test_every_rule_says_where_it_comes_from_and_what_to_do(rule):
    assert rule.examples
    assert rule.source
    assert rule.kind != "cause" or rule.hint
    assert hasattr(Seen(BOOK, 0.0, Budgets()), f"_{rule.kind}")


@pytest.mark.parametrize(
    "filler", ["a b ", "x", "1 ", "{'a': ", "(", "group a joined={b} ", "= ", "step 1: ", "POST /"]
)
def test_no_line_costs_more_than_its_length(filler):
    """Text that a model wrote cannot stall the judge: each pattern is quick on the longest line."""
    line = (filler * LONGEST)[:LONGEST]
    begun = time.process_time()
    parse_line(line)
    parse_metrics(line)
    redact(line[:2000])
    for rule in BOOK.rules:
        rule.pattern.search(line)
    assert time.process_time() - begun < 1.5


def test_frameworks_are_covered():
    text = " ".join(path.read_text() for path in FOLDER.glob("*.toml")).lower()
    for name in ("miles", "slime", "sglang", "vllm", "ray", "nccl", "cuda", "triton", "verl", "trl", "prime-rl"):
        assert name in text
    assert set(KINDS) == {rule.kind for rule in BOOK.rules}


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("sglang::scheduler_TP0", "engine"),
        ("VLLM::EngineCore", "engine"),
        ("python -m sglang.launch_server --model x", "engine"),
        ("/usr/bin/python3 /usr/bin/vllm serve x --port 8000", "engine"),
        ("ray::SGLangEngine.generate", "engine"),
        ("ray::IDLE", "ray"),
        ("python train.py --lr 1", "trainer"),
        ("/usr/bin/nvidia-smi", "helper"),
        ("bash run.sh", "other"),
    ],
)
def test_roles(command, role):
    assert BOOK.role(command) == role


GOOD = """
[[rule]]
id = "licence-server-down"
kind = "cause"
literals = ["licence server"]
pattern = 'licence server (?P<host>\\S+) unreachable'
summary = "the licence server {host} does not answer"
hint = "Start it."
"""


def test_a_users_rule_goes_before_ours(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(GOOD)
    (hit,) = hits(load_rules([path]), "RuntimeError: licence server lic7 unreachable")
    assert hit.rule.id == "licence-server-down"
    assert hit.summary() == "the licence server lic7 does not answer"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('kind = "cause"', 'kind = "cuase"'), "did you mean 'cause'"),
        (("literals", "literal"), "did you mean 'literals'"),
        (('["licence server"]', '["a"]'), "at least 4"),
        (('["licence server"]', '["licence\\nserver"]'), "span lines"),
        (('["licence server"]', '"licence server"'), "must be of type list"),
        (("(?P<host>", "(?P<host"), "not a regular expression"),
        (('id = "licence-server-down"', ""), "'id' is missing"),
        (("[[rule]]", "[rule]"), "list of tables"),
        (('hint = "Start it."', 'verdict = "dead"'), "unknown verdict"),
        (('hint = "Start it."', "weak = 1"), "must be of type bool"),
        (('kind = "cause"', 'kind = "progress"'), "needs a 'clock'"),
        (('hint = "Start it."', 'waits = ["a"]'), "[who, whom]"),
        (("[[rule]]", "[[rule"), "not valid TOML"),
    ],
)
def test_a_wrong_rule_is_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "my.toml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UsageError) as error:
        load_rules([path])
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_rules_file_is_refused(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("")
    with pytest.raises(UsageError, match="no rule in it"):
        load_rules([path])
