"""The checklist, in its order: one module a stage."""

from gradwire.topology.gdr.model import GdrCheck
from gradwire.topology.gdr.stages import (
    stage0_environment,
    stage1_gpu,
    stage2_rdma,
    stage3_glue,
    stage4_path,
    stage5_settings,
    stage6_proof,
)

CHECKS: tuple[GdrCheck, ...] = (
    *stage0_environment.CHECKS,
    *stage1_gpu.CHECKS,
    *stage2_rdma.CHECKS,
    *stage3_glue.CHECKS,
    *stage4_path.CHECKS,
    *stage5_settings.CHECKS,
    *stage6_proof.CHECKS,
)
"""Every check in the order in which causes are looked for."""
