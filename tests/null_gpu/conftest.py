"""These tests want torch's CUDA build over the null runtime: ``make null-gpu``."""

import pytest
import torch

NAME = "Null H200"


def is_null() -> bool:
    """Return whether this process computes on the null GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_name(0) == NAME


@pytest.fixture(autouse=True)
def null_gpu() -> None:
    """Skip what cannot run here; kernels of cuDNN are not emulated."""
    if not is_null():
        pytest.skip("needs torch over the null GPU: make null-gpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
