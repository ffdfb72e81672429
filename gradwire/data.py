"""Data for ranks of unlike speed: `gradwire.data.SpeedBatchSampler`.

See docs/how-to/find_the_slow_rank.md.
"""

from gradwire.comms.step.sample_balancing import SpeedBatchSampler

__all__ = ["SpeedBatchSampler"]
