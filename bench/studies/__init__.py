"""Studies, each of which measures the figures of a page of docs/ and says which; run from a checkout, not in the wheel.

A wheel has this file alone of it, to say so.
"""

from pathlib import Path

if not (Path(__file__).parent / "tables").is_dir():
    raise ModuleNotFoundError("gradwire's studies are not in a wheel: `pip install -e .` in a checkout brings them")
