"""The one error that reading a description of a machine may raise."""


class TopologyError(ValueError):
    """A description of a machine cannot be used; the message says what was found, where, and what to do.

    Attributes:
        source: The file or input the description came from, where known.
        line: Its line, counted from 1, where known.
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
        """Returns this error with the name of the input it came from.

        Args:
            source: Path of a file, or a word such as `sysfs`.
        """
        return TopologyError(self.message, source=source, line=self.line)
