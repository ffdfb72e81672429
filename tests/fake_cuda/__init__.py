"""Runs the CUDA path of Python code on a torch without CUDA, and watches its order: no GPU is needed, or used.

`fake_cuda()` patches torch (and nothing but torch) so that tensors on `cuda:0`, `cuda:1`, ... can be made; they live in
host memory, and every operation on them runs at once on the CPU. Streams and events are replaced by vector clocks
(`clocks`), so the recorder knows what a GPU would have been free to run in another order:

- a *race*: two accesses to the same bytes, one of them a write, that nothing orders;
- *reuse before completion*: memory goes back to the caching allocator while another stream than its own may still use
  it, and neither `record_stream` nor a wait covers that;
- a *host wait*: the host blocked until a stream was through (`.item()`, `bool()`, `.cpu()`, `synchronize()`);
- an *order error*: members of an NCCL communicator issue different collectives (`nccl`), which would hang a GPU.

Ranks are threads (`ranks`), each with the device of its number. `drive` runs gradwire on it;
docs/develop/find_races_without_a_gpu.md shows how to use it.
"""
