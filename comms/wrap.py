"""DDP with small buckets, so that what travels together is gradwire's to decide, step by step."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comms.config import AUTO_FUSION, BUCKET, Config
from gradwire.comms.hook import HookState, comm_hook

BASE_BUCKET_MB = 2.0
"""Small against any useful transfer, large against the cost of a hook call (some 20 microseconds each)."""

FUSION_MB = 25.0
"""DDP's own default for what travels together."""


def wrap(
    module: nn.Module,
    *,
    base_bucket_mb: float = BASE_BUCKET_MB,
    config: Config | None = None,
    ddp_options: dict[str, object] | None = None,
    **options: object,
) -> tuple[DistributedDataParallel, HookState]:
    """Wraps a module in DDP with small buckets and registers gradwire's hook, which joins them into transfers.

    Args:
        module: On its device.
        base_bucket_mb: DDP's `bucket_cap_mb`: the grain of fusion.
        config: As for `HookState`.
        ddp_options: Keyword arguments of DistributedDataParallel, `bucket_cap_mb` aside.
        **options: Fields of `Config`; `fusion` is 25 unless given.

    Returns:
        The DDP model, and the state of its hook.

    Raises:
        ValueError: `base_bucket_mb` is not positive, or `bucket_cap_mb` is among `ddp_options`.
    """
    if not base_bucket_mb > 0:
        raise ValueError(f"`base_bucket_mb` is {base_bucket_mb}; wanted a positive number of MiB")
    if ddp_options and "bucket_cap_mb" in ddp_options:
        raise ValueError(
            "`ddp_options` has `bucket_cap_mb`; wanted it as `base_bucket_mb`, and `fusion` for what travels together"
        )
    if config is None:
        fusion = options.get("fusion") or Config.from_env().fusion
        if "fusion_mb" not in options and fusion == AUTO_FUSION:
            options["fusion"] = f"{AUTO_FUSION}:{FUSION_MB:g}"
        elif not {"fusion", "fusion_mb"} & options.keys() and fusion == BUCKET:
            options["fusion"] = FUSION_MB
    config = Config.given(config, options)
    model = DistributedDataParallel(module, bucket_cap_mb=base_bucket_mb, **(ddp_options or {}))  # type: ignore[arg-type]
    state = HookState(model, config=config)
    model.register_comm_hook(state, comm_hook)
    return model, state
