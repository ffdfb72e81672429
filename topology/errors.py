"""The one error that reading a description of a machine may raise."""


class TopologyError(ValueError):
    """Reports a description of a machine that cannot be used: what was found, where, and what to do.

    Attributes:
        message: The message without source and line.
        source: File or input that the description came from; None if unknown.
        line: Number of the line in that file, from 1; None if unknown.
    """

    def __init__(self, message: str, *, source: str | None = None, line: int | None = None) -> None:
        self.message = message
        self.source = source
        self.line = line
        super().__init__(message)

    def __str__(self) -> str:
        place = [] if self.source is None else [self.source]
        place += [] if self.line is None else [f"line {self.line}"]
        return f"{', '.join(place)}: {self.message}" if place else self.message

    def at(self, source: str) -> "TopologyError":
        """Returns a copy of this error with the name of the input it came from.

        Args:
            source: Path of a file, or a word such as `sysfs`.
        """
        return TopologyError(self.message, source=source, line=self.line)
