"""Write ``docs/gap-reference.md`` from the data files of ``zerogap.gap``."""

from pathlib import Path

from zerogap.files import write_text_atomic
from zerogap.gap.pages import reference_page


def main() -> None:
    """Write the page."""
    write_text_atomic(Path(__file__).resolve().parent.parent / "docs" / "gap-reference.md", reference_page())


if __name__ == "__main__":
    main()
