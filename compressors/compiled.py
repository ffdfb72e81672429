"""The compiled part, gradwire._native (csrc/cpu), for all who call it; where it cannot be used, this says what to do.

A wheel for every machine has none, and a checkout may have one of other sources.
"""

try:
    import gradwire._native as native
except ModuleNotFoundError as error:
    raise ImportError(
        "gradwire was installed without its compiled part, which training needs (the wheel py3-none-any is for "
        "`gradwire doctor`, `topo` and `gdr-check` alone): install the wheel of this machine, or, with a C++ compiler, "
        f"`pip install --no-binary gradwire --force-reinstall --no-deps gradwire` ({error})"
    ) from error
except ImportError as error:
    raise ImportError(
        f"gradwire's compiled part cannot be loaded: {error}. Where it was built for another machine, install the "
        "wheel of this one, or `pip install --no-binary gradwire --force-reinstall --no-deps gradwire`"
    ) from error

__all__ = ["native"]

_INTERFACE = 4
"""Version of payloads' bytes, functions and parameters, as these files know them; csrc/cpu/bind.cpp has the same."""

if (_compiled := getattr(native, "INTERFACE", None)) != _INTERFACE:  # one built before there were numbers has none
    raise RuntimeError(
        f"`gradwire._native` ({native.__file__}) was compiled from other sources than these Python files: found "
        f"interface {_compiled}, wanted {_INTERFACE}; rebuild it: `pip install -e .` in the checkout"
    )
