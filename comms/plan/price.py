"""What a compressor does to the phase that it shrinks: the numbers that the planner needs, wherever they come from."""

from dataclasses import dataclass

EXCHANGE_ROUNDS = 2
"""Collectives of most compressors: an all_to_all of payloads, and an all_gather of the owners' answers."""


@dataclass(frozen=True, slots=True)
class CodecPrice:
    """What a compressor does to one phase.

    Attributes:
        name: As in `compressor=`.
        ratio: Bytes on the wire over those of an exact all-reduce of the same shard.
        seconds_per_byte: Of the shard, for encoding and decoding on one rank.
        call_seconds: For each shard, whatever its size.
        rounds: Times that every member hears from every other: 2 for an all_to_all and an all_gather, and for a ring's
            all_reduce.
        exchanged: Whether payloads go from everybody to everybody, and not around a ring.
    """

    name: str
    ratio: float = 1.0
    seconds_per_byte: float = 0.0
    call_seconds: float = 0.0
    rounds: int = EXCHANGE_ROUNDS
    exchanged: bool = True

    def seconds(self, nbytes: float) -> float:
        """Encoding and decoding of one shard of `nbytes`."""
        return self.call_seconds + self.seconds_per_byte * nbytes


EXACT = CodecPrice("none")
"""No compressor."""
