"""Sharded training with FSDP2: `state = gradwire.fsdp.apply(model, compressor="int8")`.

See docs/how-to/train_sharded.md.
"""

from gradwire.comms.sharded.apply import apply
from gradwire.comms.sharded.state import FsdpState

__all__ = ["FsdpState", "apply"]
