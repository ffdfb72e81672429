"""Wraps a module in DDP with small buckets, so that gradwire decides which of them to all-reduce together."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.config import AUTO_FUSION, BUCKET, Config
from gradwire.comms.hook import HookState, comm_hook

BASE_BUCKET_MB = 2.0
"""Size of DDP's buckets in MiB: small against any useful transfer, but each pays for the cost of its hook call (some 20
microseconds)."""

FUSION_MB = 25.0
"""MiB of buckets that are reduced together by default: the size of DDP's own buckets."""


def wrap(
    module: nn.Module,
    *,
    base_bucket_mb: float = BASE_BUCKET_MB,
    config: Config | None = None,
    ddp_options: dict[str, object] | None = None,
    **options: object,
) -> tuple[DistributedDataParallel, HookState]:
    """Wraps a module in DDP with small buckets and registers gradwire's hook, which joins them into all-reduces.

    Args:
        module: The module to train, on the device that it is trained on.
        base_bucket_mb: Size of DDP's buckets in MiB (its `bucket_cap_mb`); all-reduces are of whole buckets.
        config: Configuration of the hook; None makes it from `options` and the environment.
        ddp_options: Other keyword arguments of DistributedDataParallel, without `bucket_cap_mb`.
        **options: Fields of `Config` by name. Without `config`, `fusion` is 25 MiB unless it is given here or in the
            environment, and "auto" stands for "auto:25".

    Returns:
        The DDP model, and the state of its hook.

    Raises:
        ValueError: `base_bucket_mb` is not positive, or `bucket_cap_mb` is among `ddp_options`; torch.distributed is
            not initialised; or `HookState` refuses a value or the module.
        TypeError: An option has an unknown name.
        RuntimeError: A rank did not join.
    """
    if not base_bucket_mb > 0:
        raise ValueError(f"`base_bucket_mb` is {base_bucket_mb}; wanted a positive number of MiB")
    if ddp_options and "bucket_cap_mb" in ddp_options:
        raise ValueError(
            "`ddp_options` has `bucket_cap_mb`; wanted it as `base_bucket_mb`, and `fusion` for all-reduces"
        )
    if config is None:
        fusion = options.get("fusion", Config.from_env().fusion)
        if fusion == AUTO_FUSION:
            options["fusion"] = f"{AUTO_FUSION}:{FUSION_MB:g}"
        elif fusion == BUCKET and "fusion" not in options:
            options["fusion"] = FUSION_MB
    config = Config.given(config, options)
    model = DistributedDataParallel(module, bucket_cap_mb=base_bucket_mb, **(ddp_options or {}))  # type: ignore[arg-type]
    state = HookState(model, config=config)
    model.register_comm_hook(state, comm_hook)
    return model, state
