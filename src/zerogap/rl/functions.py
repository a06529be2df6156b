"""Finds what ``module:function`` names; what goes wrong is one line."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from zerogap.errors import UsageError, nearest


def load_function(reference: str, key: str) -> Callable[..., Any]:
    """Import the function that ``reference`` names; modules of the current folder are found first.

    Args:
        reference: ``module:function``, also ``package.module:Class.method``.
        key: the configuration key it came from, for the error line.

    Raises:
        UsageError: no such module or function, an import that fails, or something that cannot be called.
    """
    module_name, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    where = f"{key} = '{reference}'"
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise UsageError(
                f"{where}: no module {missing!r}; put {missing.split('.')[0]}.py into the current folder or install it"
            ) from None
        raise UsageError(f"{where}: module {module_name!r} needs {missing!r}, which is not installed") from None
    except (Exception, SystemExit) as error:
        raise UsageError(f"{where}: importing {module_name!r} failed: {describe(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{where}: {module_name!r} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{where}: is not a function but {type(found).__name__}")
    function: Callable[..., Any] = found
    return function


def describe(error: BaseException, limit: int = 300) -> str:
    """Return ``Type: message`` of an exception as one line of at most ``limit`` characters."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its text cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
