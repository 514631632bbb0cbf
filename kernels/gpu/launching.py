"""Programmatic dependent launch: a kernel is set up while the one before it ends (CUDA, compute capability 9.0).

Kernels of few rows are so short that setting them up shows: it is 2.5% of a step of one row on an H200, 0.5%
of eight. From 32 rows on the kernels that wait take room from the one that runs, and steps get slower.
"""

import torch
import triton
import triton.language as tl

_MOST_ROWS = 8


def early(rows: int, device: torch.device) -> dict[str, bool]:
    """Options of the launch of a kernel that takes PDL and calls `after_previous` before it touches any data."""
    if rows > _MOST_ROWS or device.type == "cpu" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Waits until the kernel before is done and its writes are seen; only then may the next one be set up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
