"""How large the gradient is, and in which shapes: from a number or from a model's list of parameters."""

import json
from pathlib import Path

from gradwire.comms.plan.codec_price import ELEMENT_NBYTES, layout_of, square_layout
from gradwire.compressors.base import Layout


def gradient_of(model: Path | None, megabytes: float | None) -> tuple[Layout, int]:
    """The layout of a gradient and its bytes in float32.

    Args:
        model: A JSON file with the parameters, or None.
        megabytes: Size of the gradient where there is no file; square matrices are assumed.

    Raises:
        ValueError: The file does not describe parameters.
        OSError: The file cannot be read.
    """
    if model is None:
        nbytes = round((megabytes or 0.0) * 1e6)
        return square_layout(nbytes), nbytes
    try:
        shapes = [_parameter(entry) for entry in _entries(json.loads(model.read_text(encoding="utf-8")))]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`model-json` {model} is no JSON: {error}") from None
    layout = layout_of(shapes)
    if not layout.numel:
        raise ValueError(f"`model-json` {model} has no elements; wanted at least one parameter")
    return layout, layout.numel * ELEMENT_NBYTES


def _entries(document: object) -> list[tuple[object, object]]:
    """Names and shapes, unchecked, of either form."""
    if isinstance(document, dict) and isinstance(document.get("parameters"), list):
        document = document["parameters"]
    if isinstance(document, dict):
        return list(document.items())
    if isinstance(document, list) and all(isinstance(entry, dict) for entry in document):
        return [(entry.get("name"), entry.get("shape")) for entry in document]
    raise ValueError('`model-json` is neither {"name": [shape], ...} nor [{"name": ..., "shape": [...]}, ...]')


def _parameter(entry: tuple[object, object]) -> tuple[str, tuple[int, ...]]:
    name, shape = entry
    if not isinstance(name, str) or not isinstance(shape, list):
        raise ValueError(  # noqa: TRY004 - the content of a file is a value, whatever its type
            f"`model-json` has a parameter {name!r} of shape {shape!r}; wanted a name and a list of numbers"
        )
    for extent in shape:
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
            raise ValueError(f"`model-json` gives {name!r} the shape {shape!r}; wanted whole numbers >= 0")
    return name, tuple(shape)
