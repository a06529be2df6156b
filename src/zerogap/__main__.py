"""The ``zerogap`` command, also as ``python -m zerogap``."""

from zerogap import signals


def main() -> None:
    """Load the command line and run it."""
    with signals.quitting():
        from zerogap.cli import main as command
    command()


if __name__ == "__main__":
    main()
