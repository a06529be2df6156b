"""Options that several verbs of the command line have, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]

# What a source of the gap is judged by: `gap` and `report`.
ColumnMap = Annotated[
    list[str] | None, typer.Option("--map", metavar="COLUMN=THEIRS", help="Name a column of the source.")
]
Gpu = Annotated[str | None, typer.Option(help="GPU of the run: picks the healthy range.")]
Model = Annotated[str | None, typer.Option(help="Model of the run: picks the healthy range.")]
Baseline = Annotated[str | None, typer.Option(help="Name of the healthy range.")]
