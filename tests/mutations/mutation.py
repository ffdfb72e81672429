"""What a planted fault is, and where it goes."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault, planted in one place.

    Attributes:
        name: What is wrong, in a few words; unique.
        file: Where, from the checkout's root.
        old: Text that is there exactly once.
        new: What stands in its place.
        why: What goes wrong on a GPU.
        tests: Of which one must fail, as pytest takes them, from the checkout's root.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: The old text is not there exactly once: the code has moved on, and this has to follow.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"`{self.name}`: its old text is {count} times in {self.file}; wanted once:\n{self.old}")
        return text.replace(self.old, self.new)
