"""Waits, events and memory between streams: comms/streams.py, comms/run and kernels/cuda/launch.py."""

from mutations.mutation import Mutation

_STREAMS = "comms/streams.py"
_EXECUTOR = "comms/run/stream_executor.py"
_PROGRAMS = "comms/run/programs.py"
_LAUNCH = "compressors/kernels/cuda/launch.py"
_HOOK = "tests/fake_cuda/test_hook_streams.py::"
_COMPRESSED = "tests/fake_cuda/test_compressed_streams.py::"
_PLANTED = "tests/fake_cuda/test_mutations.py::test_gradwire_keeps"
_ORDER = "tests/fake_cuda/test_issue_order.py"
_LAUNCHES = "tests/fake_cupy/"

STREAMS = (
    Mutation(
        "side streams wait for nothing",
        _STREAMS,
        "            stream.wait_event(self._reached)\n            for tensor in tensors:\n",
        "            for tensor in tensors:\n",
        "A collective reads a bucket that backward still writes.",
        (f"{_HOOK}test_every_plan[hierarchical-aabb-1]",),
    ),
    Mutation(
        "what travels is not noted on its streams",
        _STREAMS,
        "                tensor.record_stream(stream)\n",
        "                pass\n",
        "A tensor that the caller lets go of is handed out again while a side stream reads it.",
        (_PLANTED,),
    ),
    Mutation(
        "all chunks are issued on the first stream",
        _STREAMS,
        "return cast(AbstractContextManager[object], self._streams[number % STREAMS])",
        "return cast(AbstractContextManager[object], self._streams[0])",
        "Marks and waits are on the chunk's own stream, where nothing runs.",
        (f"{_HOOK}test_every_plan",),
    ),
    Mutation(
        "one side stream in the place of two",
        _STREAMS,
        "\nSTREAMS = 2\n",
        "\nSTREAMS = 1\n",
        "A chunk between the nodes and one inside them do not overlap.",
        (_ORDER,),
    ),
    Mutation(
        "what runs alone does not wait for the stream that computes",
        _STREAMS,
        "        for before in (torch.cuda.current_stream(self._index), *others):\n",
        "        for before in others:\n",
        "State is changed beside the kernels that the user's stream still runs.",
        (f"{_HOOK}test_sparse_gradients_have_no_race_and_the_bits_of_the_cpu", "tests/comms/outer/test_streams.py"),
    ),
    Mutation(
        "what runs alone does not wait for the other side streams",
        _STREAMS,
        "        for before in (torch.cuda.current_stream(self._index), *others):\n",
        "        for before in (torch.cuda.current_stream(self._index),):\n",
        "A step is decided while a chunk on the other stream still encodes.",
        (f"{_ORDER}::test_no_event_is_made_to_put_one_stream_behind_another",),
    ),
    Mutation(
        "the other side streams do not wait for what ran alone",
        _STREAMS,
        "        for stream in others:\n            self._put_behind(stream, first)\n",
        "",
        "The next step reads residuals before the last one has been committed.",
        (f"{_COMPRESSED}test_several_steps_in_the_same_buckets",),
    ),
    Mutation(
        "the stream that computes does not come behind the side streams",
        _STREAMS,
        "            self._put_behind(computing, stream)\n",
        "            pass\n",
        "What the user reads after a flush, or after a launch that failed, is still being written.",
        (
            "tests/fake_cuda/test_issue_order.py",
            "tests/comms/outer/test_streams.py",
            "tests/comms/bootstrap/test_endings_on_cuda.py::test_wherever_memory_ends_everybody_hears_of_it",
        ),
    ),
    Mutation(
        "times are read in the step that they are of",
        _STREAMS,
        "    lag = 1\n",
        "    lag = 0\n",
        "The host waits for the device in every step.",
        (f"{_HOOK}test_the_search_for_cuts_looks_at_each_step_a_step_later",),
    ),
    Mutation(
        "the clock does not wait for its last event",
        _STREAMS,
        "        last.synchronize()\n",
        "",
        "elapsed_time raises for an event that the device has not passed.",
        (f"{_HOOK}test_a_report_waits_for_the_times_that_it_has",),
    ),
    Mutation(
        "a late flag is read before its copy is done",
        _STREAMS,
        "        self._copied.synchronize()\n",
        "",
        "The host decides by what pinned memory held before.",
        (f"{_COMPRESSED}test_several_steps_in_the_same_buckets",),
    ),
    Mutation(
        "joined buckets are not awaited by the other chunks",
        _EXECUTOR,
        "                    streams.wait(number, (packed,))\n",
        "                    pass\n",
        "A chunk is sent while its buckets are still copied together.",
        (f"{_HOOK}test_joined_buckets",),
    ),
    Mutation(
        "a collective is not awaited",
        _EXECUTOR,
        "        for work in transition.works:\n            work.wait()\n        if transition.lane[0] >= phase:",
        "        if transition.lane[0] >= phase:",
        "What follows reads a buffer that NCCL still writes.",
        (f"{_HOOK}test_every_plan[hierarchical-aabb-1]",),
    ),
    Mutation(
        "a launch ends before its other chunks",
        _EXECUTOR,
        "            self._streams.wait(held.number, run.ends)\n",
        "",
        "The future orders the last chunk's stream alone.",
        (f"{_COMPRESSED}test_chunks",),
    ),
    Mutation(
        "the end of a chunk is marked on another stream",
        _EXECUTOR,
        "                run.ends.append(self._streams.mark(held.number))",
        "                run.ends.append(self._streams.mark(held.number + 1))",
        "The launch waits for an event that does not stand behind the chunk.",
        (f"{_COMPRESSED}test_chunks",),
    ),
    Mutation(
        "a bucket ends before its first pieces",
        _EXECUTOR,
        "                    self._streams.wait(held.number, bucket.ends)\n",
        "                    pass\n",
        "The bucket's future orders the last piece alone.",
        (_PLANTED,),
    ),
    Mutation(
        "a chunk comes down at once",
        _EXECUTOR,
        "                before, self._held = self._held, _HeldChunk(run, steps, number)\n",
        "                before = _HeldChunk(run, steps, number)\n",
        "The next chunk waits inside the node for this one to come back from the network, which idles meanwhile.",
        (_ORDER,),
    ),
    Mutation(
        "a rank comes down first",
        _EXECUTOR,
        "                before, self._held = self._held, _HeldChunk(run, steps, number)\n",
        "                before, self._held = self._held, _HeldChunk(run, steps, number)\n"
        "                if self._rank == 0:\n"
        "                    before, self._held = self._held, None\n",
        "Ranks issue the collectives of a node in different orders.",
        ("tests/fake_cuda/test_order.py",),
    ),
    Mutation(
        "a direct collective's future is complete at once",
        _EXECUTOR,
        "            bucket.future = cast(Open, work.get_future().then(_only))\n",
        "            bucket.future = torch.futures.Future()\n            bucket.future.set_result(bucket.flat)\n",
        "Past the timed steps the optimizer reads gradients that NCCL still writes.",
        (f"{_HOOK}test_thirty_steps",),
    ),
    Mutation(
        "extremes are looked at before the sum is there",
        _EXECUTOR,
        "            if run.extremes:\n                torch.aminmax(run.flat, out=run.extremes)\n"
        "                self._extremes += run.extremes\n",
        "",
        "A step with an infinite average commits its residuals.",
        (f"{_COMPRESSED}test_loss_scaling",),
    ),
    Mutation(
        "a contribution is scaled before it is widened",
        _PROGRAMS,
        "        return shard.float().mul_(scale)\n",
        "        return shard.mul(scale).float()\n",
        "Each bfloat16 gradient is rounded once more.",
        (_PLANTED,),
    ),
    Mutation(
        "moved state is not awaited",
        "comms/migration.py",
        "        node.all_reduce(rows.view(-1)).wait()\n",
        "        node.all_reduce(rows.view(-1))\n",
        "Residuals are adopted while the node still sums them.",
        (f"{_COMPRESSED}test_rebuilt_buckets",),
    ),
    Mutation(
        "scratch memory is shared by streams",
        _LAUNCH,
        "    key = device.type, device.index, stream_of(device)\n",
        "    key = device.type, device.index, 0\n",
        "Two chunks' selections write the same counts.",
        (f"{_LAUNCHES}test_races.py::test_no_launch_has_a_race[powersgd-owned_by_some]",),
    ),
    Mutation(
        "tables are shared by streams",
        _LAUNCH,
        "    return _uploaded(tuple(words), device, stream_of(device))\n",
        "    return _uploaded(tuple(words), device, 0)\n",
        "A kernel reads a table whose copy was queued on another stream.",
        (f"{_LAUNCHES}test_races.py::test_no_launch_has_a_race[dgc-alike]",),
    ),
    Mutation(
        "kernels run on CuPy's default stream",
        _LAUNCH,
        "        with _cupy_stream(stream_of(device), index):\n",
        "        with torch.cuda.device(index):\n",
        "Nothing orders them after the collectives on torch's streams.",
        (f"{_LAUNCHES}test_bits.py::test_the_kernels_of_cuda_give_the_bits_of_the_cpu[int8]",),
    ),
    Mutation(
        "what ranks tell of themselves is in the way of what torch issues",
        "comms/observe/number_exchange.py",
        "            communicator.sync_current_stream()\n",
        "",
        "DDP's broadcast of running means and a sum of gradwire's wait for each other on a GPU with room for one.",
        (f"{_HOOK}test_what_torch_issues_between_steps_is_behind_every_collective",),
    ),
    Mutation(
        "a step ends before DDP waits for its map of used parameters",
        "comms/hook.py",
        "        after_ddp = self._session is not None and self._session.listeners.ends_after_ddp\n",
        "        after_ddp = False\n",
        "What gradwire issues for itself at the end of a step runs beside DDP's own sum.",
        (f"{_HOOK}test_a_step_ends_behind_the_call_in_which_ddp_waits_for_its_map",),
    ),
)
