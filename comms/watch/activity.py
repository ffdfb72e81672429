"""Activity of a rank's main thread, sampled: data loader, forward and backward pass, optimizer, checkpoints, others.

Each poll of the watch looks at the thread's stack, and counts the time since the previous poll for the activity that
the files on the stack stand for.
"""

from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

from gradwire.comms.observe.stack import frame_of, line_of

LOADER, OPTIMIZER, SAVING, COLLECTIVE, BACKWARD, FORWARD, OWN = (
    "the data loader",
    "the optimizer",
    "saving a checkpoint",
    "collectives",
    "the backward pass",
    "the forward pass",
    "the script itself",
)
FOLDERS = (
    (LOADER, ("/torch/utils/data/",)),
    (SAVING, ("/torch/serialization", "/torch/distributed/checkpoint/")),
    (
        COLLECTIVE,
        ("/torch/distributed/distributed_c10d", "/torch/distributed/_functional_collectives", "/comms/watch/messages"),
    ),
    (OPTIMIZER, ("/torch/optim/",)),
    (BACKWARD, ("/torch/autograd/",)),
    (FORWARD, ("/torch/nn/modules/",)),
)
"""Activity -> parts of file paths by which it is recognized. The first activity of which a file is on the stack
counts."""

QUEUE = "the queue for a processor, which others use"
"""Name of the time in which the thread was ready to run while the kernel ran other threads. It overlaps with the
activities above."""


def activity_of(frame: FrameType | None) -> str:
    """Returns the activity of a thread, the first of `FOLDERS` that a file on its stack belongs to; else `OWN`.

    Args:
        frame: Innermost frame of its stack; None for a thread that has ended.
    """
    files = set()
    while frame is not None:
        files.add(frame.f_code.co_filename)
        frame = frame.f_back
    for kind, parts in FOLDERS:
        if any(part in file for file in files for part in parts):
            return kind
    return OWN


def queue_seconds(thread: int) -> float:
    """Returns the seconds for which a thread has waited for a processor; 0 if the kernel does not count them.

    Args:
        thread: Number of a thread of this process in the kernel (`native_id`).

    Source: https://docs.kernel.org/scheduler/sched-stats.html, the second number of /proc/<pid>/schedstat.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        # The kernel lacks CONFIG_SCHED_INFO, or the thread has ended.
        return 0.0


class Activity:
    """Counts how long a thread was seen in each activity, and in which line.

    Args:
        thread: Number of the thread by `threading.get_ident`.

    Attributes:
        seconds: Activity -> seconds for which it was seen.
    """

    def __init__(self, thread: int) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = thread
        self._lines: dict[str, Counter[str]] = {}

    def sample(self, seconds: float) -> None:
        """Counts the present activity and line of the thread.

        Args:
            seconds: Time since the last sample, for which it counts.
        """
        frame = frame_of(self._thread)
        kind = activity_of(frame)
        self.seconds[kind] += seconds
        line = line_of(frame)
        if line is not None:
            self._lines.setdefault(kind, Counter())[line] += 1

    def lines(self) -> dict[str, str]:
        """Returns activity -> line in which the thread was seen most often since the last call; resets the counts.

        It is the innermost line of the training script, or of the stack if the script is not on it.
        """
        found = self.newest_lines()
        self._lines.clear()
        return found

    def newest_lines(self) -> dict[str, str]:
        """Returns activity -> line in which the thread was seen most often since the last call of `lines`.

        Unlike `lines`, it leaves the counts as they are.
        """
        return {kind: counts.most_common(1)[0][0] for kind, counts in self._lines.items()}
