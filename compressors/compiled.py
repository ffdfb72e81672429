"""Imports the compiled part, `gradwire._native` (csrc/cpu), for all modules that call it; errors name the remedy.

The wheel `py3-none-any` has no compiled part, and pip takes it on a free-threaded Python, which knows no stable ABI; a
checkout has one only after `pip install -e .`, and one that was built from other sources is refused.
"""

import sysconfig
from importlib import metadata
from pathlib import Path

_FOLDER = Path(__file__).parents[1]
_INSTALL = "in a checkout of gradwire, with a C++ compiler: `pip install .`; or install the wheel of this machine"


def _hidden_installation() -> Path | None:
    """Returns the folder of an installed, compiled gradwire that the imported one hides; None if there is none."""
    try:
        installed = metadata.distribution("gradwire")
    except metadata.PackageNotFoundError:
        return None
    # An editable installation imports its Python files from the checkout by design.
    if '"editable": true' in (installed.read_text("direct_url.json") or ""):
        return None
    compiled = [Path(str(file.locate())) for file in installed.files or [] if file.match("gradwire/_native*.so")]
    return next(
        (file.parent for file in compiled if file.exists() and file.parent.resolve() != _FOLDER.resolve()), None
    )


def _missing() -> str:
    """Returns why there is no compiled part, and what to do."""
    if (hidden := _hidden_installation()) is not None:
        return (
            f"the folder {_FOLDER}, which has no compiled part, hides the gradwire that is installed in {hidden}: "
            "start Python in another folder, or with PYTHONSAFEPATH=1"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return (
            "this Python is a free-threaded build, for which there is no wheel with gradwire's compiled part, which "
            f"training needs: use the ordinary one, python{sysconfig.get_python_version()} without a `t` at the end"
        )
    return (
        "gradwire was installed without its compiled part, which training needs (the wheel py3-none-any is for "
        f"`gradwire doctor`, `topo` and `gdr-check` alone): {_INSTALL}"
    )


try:
    import gradwire._native as native
except ModuleNotFoundError as error:
    raise ImportError(f"{_missing()} ({error})") from error
except ImportError as error:
    raise ImportError(
        f"gradwire's compiled part cannot be loaded: {error}. If it was built for another machine, {_INSTALL}"
    ) from error

__all__ = ["native"]

_INTERFACE = 5
"""Version of the functions, their parameters and the payloads' bytes; csrc/cpu/bind.cpp must have the same number."""

if (_compiled := getattr(native, "INTERFACE", None)) != _INTERFACE:  # one built before there were numbers has none
    raise RuntimeError(
        f"`gradwire._native` ({native.__file__}) was compiled from other sources than these Python files: found "
        f"interface {_compiled}, wanted {_INTERFACE}; rebuild it: `pip install -e .` in the checkout"
    )
