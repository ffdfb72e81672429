"""What gradwire needs of torch, said in words: this module runs without torch, and with one that is too old."""

import importlib
import re

OLDEST = (2, 13)
"""Release of torch, major and minor."""

_WANTED = f"gradwire needs torch {OLDEST[0]}.{OLDEST[1]} or newer"


def require_torch() -> None:
    """Imports torch, or says what to do.

    Raises:
        ModuleNotFoundError: There is no torch.
        ImportError: It is too old.
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
    """Why a release of torch cannot be used; None where it can.

    Args:
        version: As `torch.__version__` says: `2.13.0+cpu`, `2.16.0a0+git1234`.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return None  # a version of another form is a build of somebody's own, who knows what it is
    return f"{_WANTED}, and finds {version}"
