"""What a rank's main thread spends its time on: a sample now and then of where it stands."""

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
"""What the files of torch on a stack mean; the first kind that is found anywhere on the stack counts."""

QUEUE = "the queue for a processor, which others use"
"""Not a part of the kinds above, but of the same time: the thread could run, and the kernel let others."""


def activity_of(frame: FrameType | None) -> str:
    """What a thread is busy with.

    Args:
        frame: The innermost one of its stack.
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
    """Seconds that a thread of this process has waited for a processor; 0 where the kernel does not say.

    Args:
        thread: As the kernel numbers it.

    Source: https://docs.kernel.org/scheduler/sched-stats.html, the second number of /proc/<pid>/schedstat.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel without CONFIG_SCHED_INFO, or the thread has ended
        return 0.0


class Activity:
    """Counts what a thread is seen doing.

    Args:
        thread: As `threading.get_ident` numbers it.

    Attributes:
        seconds: Kind -> for how long it was seen at it.
    """

    def __init__(self, thread: int) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = thread
        self._lines: dict[str, Counter[str]] = {}

    def sample(self, seconds: float) -> None:
        """Looks where the thread stands.

        Args:
            seconds: Since the last sample: it counts for as long.
        """
        frame = frame_of(self._thread)
        kind = activity_of(frame)
        self.seconds[kind] += seconds
        line = line_of(frame)
        if line is not None:
            self._lines.setdefault(kind, Counter())[line] += 1

    def lines(self) -> dict[str, str]:
        """Kind -> the line where the thread was seen most often since the last call."""
        found = self.newest_lines()
        self._lines.clear()
        return found

    def newest_lines(self) -> dict[str, str]:
        """The same, without forgetting them."""
        return {kind: counts.most_common(1)[0][0] for kind, counts in self._lines.items()}
