"""The reference pages that are made from the code: ``docs/configuration.md`` and ``docs/metrics.md``.

``python scripts/make_reference_pages.py`` writes them; a test fails while they are out of date.
"""

from __future__ import annotations

from zerogap.rl.config import Config
from zerogap.rl.config_load import allowed, keys, section_model, toml_text
from zerogap.rl.metric_names import METRICS

_CONFIGURATION = """\
# Run configuration

`zerogap train CONFIG [section.key=value ...]` reads a TOML file. Each table below is one `[section]` of it. The file
needs `run.dir`, `run.steps` and `model.path`; every other key has a default. An unknown key, a wrong type and a value
out of range end the command with one line and exit code 2. Relative paths start at the current folder.

`section.key=value` on the command line replaces one value, written as in TOML; a bare text needs no quotes:

    zerogap train configs/quickstart.toml run.steps=20 rollout.temperature=0.7 gap.gate=warn

The run folder keeps the resolved configuration, every key written out, as `config.toml`; `zerogap train` reads it too.
A run can be resumed only with the same values of the keys marked "yes" under *bits*: they can change the bits of the
trained weights. (`run.steps` is one of them when `train.schedule` is `linear` or `cosine`, since those end there.)
"""

_METRICS = """\
# Metrics

`metrics.jsonl` in the run folder has one JSON object per step: `step` (from 0) and the metrics below. TensorBoard
gets the same numbers under the same names in `tensorboard/`. JSON has no NaN or infinity; they are written as the texts
`"nan"`, `"inf"` and `"-inf"`. A metric that does not exist at a step (an evaluation that was not due) is absent, not 0.

`d` is the log-prob gap of one token in nats, trainer minus engine, where the engine's value is the one recorded when
the token was sampled. "Compared" tokens are those with a value from both sides.
"""


def configuration_page() -> str:
    """Return ``docs/configuration.md``."""
    parts = [_CONFIGURATION]
    for section in Config.model_fields:
        parts.append(f"\n## [{section}]\n\n{section_model(section).__doc__}\n")
        parts.append("| key | accepts | default | bits | meaning |\n|---|---|---|---|---|")
        for _, key, field in (item for item in keys() if item[0] == section):
            extra = field.json_schema_extra
            bits = "no" if isinstance(extra, dict) and extra.get("bits") is False else "yes"
            if field.is_required():
                default = "needed"
            else:
                default = "unset" if field.default is None else f"`{toml_text(field.default)}`"
            cells = [f"`{section}.{key}`", allowed(field), default, bits, str(field.description)]
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return ``docs/metrics.md``."""
    lines = [_METRICS, "| name | unit | definition |", "|---|---|---|"]
    lines += [f"| `{name}` | {metric.unit} | {metric.definition} |" for name, metric in METRICS.items()]
    return "\n".join(lines) + "\n"
