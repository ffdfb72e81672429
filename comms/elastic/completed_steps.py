"""Ends a compressed step of elastic training: all ranks have its averages, whichever communicator brought them."""

from gradwire.comms.step.compressed_steps import CompressedSteps
from gradwire.comms.step.listeners import EndedStep


class CompletedSteps(CompressedSteps):
    """Commits or drops what a step left in the compressor, by the averages themselves, on CUDA as on a CPU.

    On CUDA a communicator collects the extremes of the averages that it has brought. After a rank failure the present
    communicator may be another one than that of the step, so the host looks at the averages, for which it has waited
    already.
    """

    def step_ended(self, step: EndedStep) -> None:
        """Commits the compressor's new state, or drops it if the averages are not finite."""
        with self._communicator.exclusive():
            self._compression.end_step(step.buckets, step.reduced_layouts)
