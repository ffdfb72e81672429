"""What NCCL is asked for, in which order, and how a failure ends it: comms/transport, comms/backend and the hook."""

from mutations.mutation import Mutation

_NCCL = "comms/transport/nccl.py"
_EXECUTOR = "comms/run/stream_executor.py"
_PROGRAMS = "comms/run/programs.py"
_FAILURES = "comms/run/failure_handler.py"
_GROUPS = "comms/transport/groups.py"
_CALLS = "tests/comms/transport/test_nccl_calls.py"
_LOST = "tests/comms/bootstrap/test_lost_rank_on_cuda.py"
_HOOK = "tests/fake_cuda/test_hook_streams.py::"
_ENDINGS = "tests/comms/bootstrap/test_endings_on_cuda.py::"

COLLECTIVES = (
    Mutation(
        "NCCL averages whatever the factor",
        _NCCL,
        "    if scale == 1.0 / size:\n",
        "    if scale != 1.0:\n",
        "A sum of a node's ranks is divided by the node's size, where the job's was asked for.",
        (_CALLS,),
    ),
    Mutation(
        "a factor that the dtype rounds is left to NCCL",
        _NCCL,
        "        return limits.smallest_normal <= scale <= limits.max and (significand / limits.eps).is_integer()\n",
        "        return True\n",
        "1/6 in bfloat16 is 0.2 % too large, for every element.",
        (_CALLS,),
    ),
    Mutation(
        "bfloat16 is left to torch's PREMUL_SUM",
        _NCCL,
        "    if dtype == torch.bfloat16:  # see `premultiplied_sum`\n",
        "    if dtype == torch.float8_e4m3fn:\n",
        "torch 2.13 passes the factor on as zero.",
        (_CALLS,),
    ),
    Mutation(
        "a switch is given an average",
        _NCCL,
        "    if size == 1 or in_switch or not multiplies_exactly(dtype, scale):\n",
        "    if size == 1 or not multiplies_exactly(dtype, scale):\n",
        "NCCL then sums in rings, 1.3 to 1.5 times as long.",
        (_CALLS,),
    ),
    Mutation(
        "one rank leaves the factor out",
        _NCCL,
        "    if size == 1 or in_switch or not multiplies_exactly(dtype, scale):\n",
        "    if in_switch or not multiplies_exactly(dtype, scale):\n",
        "Torch copies where a reduce-scatter has one rank.",
        (_CALLS,),
    ),
    Mutation(
        "a rank gets the first slice in the place of its own",
        _NCCL,
        "        return lambda: getattr(self._group, REDUCE_SCATTER_SINGLE)(own, whole, options)\n",
        "        own = whole[:numel]\n"
        "        return lambda: getattr(self._group, REDUCE_SCATTER_SINGLE)(own, whole, options)\n",
        "Sums land in another rank's slice.",
        (_CALLS,),
    ),
    Mutation(
        "what equal slices leave is summed by the first rank",
        _NCCL,
        "    return numel, ((size - 1, start, bounds[-1]),) if bounds[-1] > start else ()\n",
        "    return numel, ((0, start, bounds[-1]),) if bounds[-1] > start else ()\n",
        "The last rank's tail is never summed where it is gathered from.",
        (_CALLS,),
    ),
    Mutation(
        "the bounds of complex numbers count them as real ones",
        _NCCL,
        "    return torch.view_as_real(tensor).view(-1), [2 * bound for bound in bounds]\n",
        "    return torch.view_as_real(tensor).view(-1), list(bounds)\n",
        "Half of each slice is never summed.",
        (_CALLS, "tests/fake_cuda/test_nccl.py"),
    ),
    Mutation(
        "a group call that fails stays open",
        _NCCL,
        "            try:\n                self._group._end_coalescing()\n            except RuntimeError as second:\n"
        '                error.add_note(f"The group call could not be ended either: {second}")\n',
        "",
        "NCCL holds back whatever this thread issues next.",
        (_CALLS,),
    ),
    Mutation(
        "a group call that fails leaves its communicator in use",
        _NCCL,
        '                error.add_note(f"The group call could not be ended either: {second}")\n'
        '            self.abort(f"a group call of NCCL failed on this rank: {error}")\n',
        '                error.add_note(f"The group call could not be ended either: {second}")\n',
        "The ranks' sequences differ from here on.",
        (_CALLS,),
    ),
    Mutation(
        "torch's watchdog judges by gradwire's own time-out",
        _NCCL,
        "        timeout + WATCHDOG_MARGIN,\n",
        "        timeout,\n",
        "It counts from the issue, so it ends the process a minute after gradwire's error.",
        (_CALLS, "tests/comms/transport/test_nccl.py", "tests/comms/bootstrap/test_endings_on_cuda.py"),
    ),
    Mutation(
        "communicators that do not fit run at once",
        "comms/transport/launch_order.py",
        "            for work in self._last[1]:\n                work.wait()\n",
        "            pass\n",
        "Two GPUs run two communicators' kernels in different orders, and wait for each other.",
        ("tests/comms/transport/test_launch_order.py",),
    ),
    Mutation(
        "what the backend leaves to torch's NCCL takes no turn",
        "comms/backend/inner_launches.py",
        "        return collective() if issuer is None else issuer.issue(collective)\n",
        "        return collective()\n",
        "FSDP2's all-gather on a group of the backend and a sum between replicas start in different orders.",
        ("tests/comms/transport/test_launch_order.py",),
    ),
    Mutation(
        "a failure aborts no communicator",
        _FAILURES,
        '            self._groups.abort(f"rank {self._reporter.rank} aborted in {where}: {error}")\n',
        "",
        "The device waits for a lost rank for ever.",
        (_LOST,),
    ),
    Mutation(
        "a failure leaves the user's own communicator as it is",
        _GROUPS,
        "        for group in [*self.values(), self._connecting, self._users]:\n",
        "        for group in [*self.values(), self._connecting]:\n",
        "What gradwire does not use itself waits for a lost rank for ever.",
        (_LOST,),
    ),
    Mutation(
        "a failure does not reach who connects",
        _GROUPS,
        "        for group in [*self.values(), self._connecting, self._users]:\n",
        "        for group in [*self.values(), self._users]:\n",
        "Torch's own abort does not know a communicator that connects, so its ranks wait for ever.",
        (f"{_CALLS}::test_abort_reaches_every_group_also_one_that_connects",),
    ),
    Mutation(
        "a communicator is ended by torch's shutdown",
        _NCCL,
        "        self._group.abort()\n",
        "        self._group.shutdown()\n",
        "NCCL waits in it for the other ranks, under the lock that an abort needs.",
        (f"{_CALLS}::test_close_never_calls_torchs_shutdown",),
    ),
    Mutation(
        "gradwire's time-out is not the job's",
        "comms/config.py",
        "        return self if self.timeout else dataclasses.replace(self, timeout=group)\n",
        "        return self if self.timeout else dataclasses.replace(self, timeout=group / 2)\n",
        "The hook ends a job that goes on without it.",
        (f"{_ENDINGS}test_the_time_out_is_the_users_groups",),
    ),
    Mutation(
        "the device goes on before it is told",
        _EXECUTOR,
        "        give_up = self._streams.verdict.give_up  # before the device can go on\n",
        "        give_up = list\n",
        "The optimizer steps on gradients that were not averaged.",
        (f"{_ENDINGS}test_no_optimizer_steps_on_what_was_not_averaged",),
    ),
    Mutation(
        "the verdict comes before the last bucket has ended",
        _EXECUTOR,
        "            bucket.result().wait()  # done for the host since it was issued\n",
        "",
        "The average is multiplied while NCCL still writes it.",
        (f"{_HOOK}test_every_plan", "tests/fake_cuda/test_mutations.py"),
    ),
    Mutation(
        "nobody watches what is under way",
        _EXECUTOR,
        "            self.last = self._streams.mark(self._issued - 1)\n            if self.deadline is not None:\n"
        "                self.deadline.watch(self.last.query)\n",
        "            self.last = self._streams.mark(self._issued - 1)\n",
        "A rank that hangs is never noticed.",
        (f"{_HOOK}test_every_step_is_watched",),
    ),
    Mutation(
        "nobody watches a direct collective",
        _EXECUTOR,
        "            self.last = IssuedWork(self._direct, lambda: self._interrupted)\n"
        "            if self.deadline is not None:\n"
        "                self.deadline.watch(self.last.query)\n",
        "            self.last = IssuedWork(self._direct, lambda: self._interrupted)\n",
        "A rank that hangs past the timed steps is never noticed.",
        (f"{_HOOK}test_every_step_is_watched",),
    ),
    Mutation(
        "a work is asked while its communicator is given up",
        "comms/streams.py",
        "        return self._given_up() or self._work.is_completed()\n",
        "        return self._work.is_completed()\n",
        "Torch answers under the lock that the abort holds, and keeps the interpreter's.",
        ("tests/fake_cuda/test_issue_order.py::test_a_work_is_not_asked_while_its_communicator_is_given_up",),
    ),
    Mutation(
        "a planned sum is complete when it is issued",
        "comms/backend/planned.py",
        "        return FutureWork(future, self._config.timeout, communicator.executor.last)\n",
        "        return FutureWork(future, self._config.timeout)\n",
        "Work.is_completed says so while the GPU is busy.",
        ("tests/fake_cuda/test_backend_streams.py",),
    ),
    Mutation(
        "nobody watches a sum of the backend that goes directly",
        "comms/backend/planned.py",
        "        communicator.executor.release()  # a sum that went directly is watched from here on, too\n",
        "",
        "It hangs beside a lost rank, and Work.is_completed says yes while the GPU is busy.",
        ("tests/fake_cuda/test_backend_streams.py",),
    ),
)
