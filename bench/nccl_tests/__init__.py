"""`gradwire bench`: the flags, columns and checks of nccl-tests."""
