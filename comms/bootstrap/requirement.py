"""Checks that a recent enough torch is installed. This module itself imports without torch, or with an old one."""

import importlib
import re

OLDEST = (2, 13)
"""Oldest supported release of torch: major and minor."""

_WANTED = f"gradwire needs torch {OLDEST[0]}.{OLDEST[1]} or newer"


def require_torch() -> None:
    """Imports torch, or raises an error that says how to install it.

    Raises:
        ModuleNotFoundError: torch is not installed.
        ImportError: torch is too old.
    """
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{_WANTED}: pip install torch (or the wheel for your CUDA, see pytorch.org)", name="torch"
        ) from None
    if (reason := too_old(torch.__version__)) is not None:
        raise ImportError(f"{reason} in {torch.__path__[0]}: pip install --upgrade torch", name="torch")


def too_old(version: str) -> str | None:
    """Returns an error message if a release of torch is too old, else None.

    Args:
        version: Value of `torch.__version__`: `2.13.0+cpu`, `2.16.0a0+git1234`.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        # A version of another form is a private build, whose owner knows what it is.
        return None
    return f"{_WANTED}, and finds {version}"
