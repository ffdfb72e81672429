"""What a drawn schedule on the GPU stand-in must show: a deadlock of torch's own NCCL groups, or other bits."""

from mutations.mutation import Mutation

_SCHEDULES = "tests/gpu_standin/test_schedules.py::test_every_schedule_gives_the_same_bits"

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
        "comms/backend/inner_turns.py",
        "        return collective() if issuer is None else issuer.issue(collective)\n",
        "        return collective()\n",
        "FSDP2's all-gather on a group of the backend and a sum between replicas start in different orders.",
        (f"{_SCHEDULES}[few multiprocessors-backend]",),
    ),
    Mutation(
        "on the stand-in: the map of used parameters is summed beside the last bucket",
        "comms/step/used_map.py",
        "        if self._in_every_step:\n            communicator.rejoin()\n",
        "        del communicator\n",
        "DDP's own sum and gradwire's wait for each other.",
        (f"{_SCHEDULES}[few multiprocessors-exact]",),
    ),
    Mutation(
        "on the stand-in: a collective is not awaited",
        "comms/run/stream_executor.py",
        "        for work in hop.works:\n            work.wait()\n        if hop.lane[0] >= phase:",
        "        if hop.lane[0] >= phase:",
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
        "on the stand-in: what runs alone does not wait for the other side streams",
        "comms/streams.py",
        "        for before in (torch.cuda.current_stream(self._index), *others):\n",
        "        for before in (torch.cuda.current_stream(self._index),):\n",
        "A step is decided while a chunk on the other stream still encodes.",
        (f"{_SCHEDULES}[room for all-compressed]",),
    ),
)
