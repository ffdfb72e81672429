"""What a drawn schedule on the GPU stand-in must show: a deadlock of torch's own NCCL groups, or other bits."""

from mutations.mutation import Mutation

_SCHEDULES = "tests/gpu_standin/test_schedules.py::test_every_schedule_gives_the_same_bits"
_ENDINGS = "tests/gpu_standin/test_endings.py"

ON_STANDIN = (
    Mutation(
        "on the stand-in: communicators that do not fit run at once",
        "comms/transport/launch_order.py",
        "            for work in self._last[1]:\n                work.wait()\n",
        "            pass\n",
        "Two GPUs run two communicators' kernels in different orders, and wait for each other.",
        (f"{_SCHEDULES}[few multiprocessors-exact]",),
    ),
    Mutation(
        "on the stand-in: what the backend leaves to torch's NCCL takes no turn",
        "comms/backend/inner_launches.py",
        "        return collective() if issuer is None else issuer.issue(collective)\n",
        "        return collective()\n",
        "FSDP2's all-gather on a group of the backend and a sum between replicas start in different orders.",
        (f"{_SCHEDULES}[few multiprocessors-backend]",),
    ),
    Mutation(
        "on the stand-in: the map of used parameters is summed beside the last bucket",
        "comms/step/used_map.py",
        "        if self._in_every_step:\n            communicator.sync_current_stream()\n",
        "        del communicator\n",
        "DDP's own sum and gradwire's wait for each other.",
        (f"{_SCHEDULES}[few multiprocessors-exact]",),
    ),
    Mutation(
        "on the stand-in: a collective is not awaited",
        "comms/run/stream_executor.py",
        "        for work in transition.works:\n            work.wait()\n        if transition.lane[0] >= phase:",
        "        if transition.lane[0] >= phase:",
        "What follows reads a buffer that NCCL still writes.",
        (f"{_SCHEDULES}[room for all-exact]",),
    ),
    Mutation(
        "on the stand-in: side streams wait for nothing",
        "comms/streams.py",
        "            stream.wait_event(self._reached)\n            for tensor in tensors:\n",
        "            for tensor in tensors:\n",
        "A collective reads a bucket that backward still writes.",
        (f"{_SCHEDULES}[room for all-exact]",),
    ),
    Mutation(
        "on the stand-in: torch's watchdog counts as gradwire does",
        "comms/transport/nccl.py",
        "WATCHDOG_MARGIN = timedelta(hours=1)",
        "WATCHDOG_MARGIN = timedelta(0)",
        "It is first, and ends the process after gradwire's error.",
        (f"{_ENDINGS}::test_torchs_watchdog_ends_no_process_that_gradwire_has_given_up",),
    ),
    Mutation(
        "on the stand-in: what was not averaged passes for an average",
        "comms/run/stream_executor.py",
        "            self._streams.verdict.apply_to(bucket.flat)\n",
        "            pass\n",
        "An optimizer steps on it, and the weights of the ranks differ.",
        (f"{_ENDINGS}::test_no_step_is_taken_silently_on_what_was_not_averaged",),
    ),
    Mutation(
        "on the stand-in: a rank that closes waits five seconds for the others",
        "comms/run/stream_executor.py",
        "        until = math.inf if seconds is None else time.monotonic() + seconds\n",
        "        until = time.monotonic() + 5.0\n",
        "The last step of a rank that is late is given up.",
        (f"{_ENDINGS}::test_a_rank_that_closes_early_waits_for_the_last_step_of_a_late_one[hierarchical]",),
    ),
)
