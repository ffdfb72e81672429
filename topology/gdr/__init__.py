"""The GPUDirect-RDMA configuration checker: one small function a check."""
