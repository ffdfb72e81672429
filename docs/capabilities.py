"""Writes docs/explanation/capabilities.md from what the code registers: `python docs/capabilities.py`.

A row is an entry of a registry: the ways in, the options of the hook, the compressors, the transports and the commands.
Listeners are listed, too, and not counted: each serves one of the options. The sentence of a row is the first one of a
docstring. A test compares the page with the code.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gradwire
from gradwire.__main__ import COMMANDS
from gradwire.comms.config import TRANSPORTS, Config
from gradwire.comms.step.listeners import StepListener
from gradwire.compressors import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "capabilities.md"
WAYS_IN = ("HookState", "attach", "wrap", "Outer", "watch")
"""Public names that put gradwire into a training script; the sharded one is `gradwire.fsdp.apply`."""
LISTENERS = "Listeners of a step, each of which serves one of the options"
TRANSPORT_MODULES = {"gloo": "torch_group", "nccl": "nccl", "mpi": "mpi"}
"""Value of `transport` -> its module in comms/transport; `auto` chooses among them."""

HEAD = """# The system in {count} capabilities

What gradwire can do, by the part of the code that registers it. The page is written by `python docs/capabilities.py`;
a test fails if a row is missing, or a sentence is not that of the code.
"""


def first_sentence(text: str | None) -> str:
    """Returns the first sentence of a docstring on one line, without the dot."""
    words = " ".join((text or "").split())
    return re.split(r"(?<=[^.][.])\s", words)[0].rstrip(".").replace("|", "or")


def option_sentences() -> dict[str, str]:
    """Returns the first sentence below each field of `Config`, by its name."""
    found: dict[str, str] = {}
    for part in Config.__mro__:
        if part is object:
            continue
        (body,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
                continue
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[field.target.id] = first_sentence(ast.literal_eval(text.value))
    return {name: found[name] for name in Config.__dataclass_fields__}


def listeners() -> Iterator[type[StepListener]]:
    """Yields every class of comms/ that follows steps, in the order of their names."""
    named = []
    for file in sorted((ROOT / "comms").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "StepListener" in map(ast.unparse, node.bases):
                module = ".".join(("gradwire", *file.relative_to(ROOT).with_suffix("").parts))
                named.append((node.name, module))
    return (getattr(importlib.import_module(module), name) for name, module in sorted(named))


def compressors() -> dict[str, str]:
    """Returns the names of each kind of compressor, joined, and the first sentence of its module."""
    kinds: dict[Callable[..., object], list[str]] = {}
    for name in registry.BUILT_IN:
        factory = registry._factories[name]
        kinds.setdefault(factory.func if isinstance(factory, partial) else factory, []).append(name)
    return {
        ", ".join(f"`{name}`" for name in names): first_sentence(inspect.getdoc(inspect.getmodule(kind)))
        for kind, names in kinds.items()
    }


def _of_module(kind: Callable[..., object]) -> str:
    return first_sentence(inspect.getdoc(inspect.getmodule(kind)))


def sections() -> dict[str, dict[str, str]]:
    """Returns the rows of the page: heading -> name -> sentence."""
    ways = {f"`gradwire.{name}`": first_sentence(getattr(gradwire, name).__doc__) for name in WAYS_IN}
    ways["`gradwire.fsdp.apply`"] = first_sentence(gradwire.fsdp.apply.__doc__)
    return {
        "Ways in": ways,
        "Options of the hook": {f"`{name}`": text for name, text in option_sentences().items()},
        "Compressors": compressors(),
        "Transports": {
            f"`{name}`": first_sentence(
                importlib.import_module(f"gradwire.comms.transport.{TRANSPORT_MODULES[name]}").__doc__
            )
            for name in TRANSPORTS
            if name != "auto"
        },
        LISTENERS: {f"`{each.__name__}`": first_sentence(each.__doc__) for each in listeners()},
        "Commands": {f"`gradwire {name}`": line for name, (_, line) in COMMANDS.items()},
    }


def counted(rows: dict[str, dict[str, str]]) -> int:
    """Returns the number of capabilities: all rows but those of listeners."""
    return sum(len(entries) for heading, entries in rows.items() if heading != LISTENERS)


def page() -> str:
    """Returns the page as it is to be."""
    rows = sections()
    text = HEAD.format(count=counted(rows))
    for heading, entries in rows.items():
        text += f"\n## {heading}\n\n| {len(entries)} | |\n|---|---|\n"
        text += "".join(f"| {name} | {sentence} |\n" for name, sentence in entries.items())
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
