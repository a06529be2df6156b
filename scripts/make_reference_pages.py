"""Write docs/configuration.md and docs/metrics.md from the code that they describe."""

from pathlib import Path

from zerogap.files import write_text_atomic
from zerogap.rl.pages import configuration_page, metrics_page


def main() -> None:
    """Write both pages."""
    docs = Path(__file__).resolve().parent.parent / "docs"
    write_text_atomic(docs / "configuration.md", configuration_page())
    write_text_atomic(docs / "metrics.md", metrics_page())


if __name__ == "__main__":
    main()
