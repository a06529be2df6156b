"""``python -m zerogap`` is the ``zerogap`` command."""

from zerogap.cli import main

if __name__ == "__main__":
    main()
