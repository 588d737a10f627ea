"""Errors of a device are told from the user's, and from those of links, by their type and their text."""

import errno
from pathlib import Path

import pytest
import torch

from varuna.core.errors import CheckpointError, DataError, DeviceError, LinkError, ModelError
from varuna.engine.device.faults import HANGS, Kind, fault_of, in_words, kind_of


def accelerator(number: int, text: str) -> RuntimeError:
    """Return what torch raises for an error of CUDA, with its number."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nSearch for `cudaError' in ...")
    error.error_code = number  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        accelerator(214, "uncorrectable ECC error encountered"),
        accelerator(700, "an illegal memory access was encountered"),
        accelerator(702, "the launch timed out and was terminated"),
        accelerator(719, "unspecified launch failure"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("NCCL: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
        DeviceError("rank 1 (stage 1) waited 300 s for GPU 0102 to finish 1F0 of step 3: it hangs."),
    ],
)
def test_a_device_that_broke(error: Exception) -> None:
    assert kind_of(error) is Kind.BROKEN


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        accelerator(2, "out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_device_that_is_too_small(error: Exception) -> None:
    assert kind_of(error) is Kind.FULL


@pytest.mark.parametrize(
    "error",
    [
        accelerator(710, "device-side assert triggered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        accelerator(1, "invalid argument"),
        accelerator(209, "no kernel image is available for execution on the device"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ],
)
def test_what_the_code_did_on_a_device_is_no_fault_of_it(error: Exception) -> None:
    assert kind_of(error) is Kind.USERS
    assert fault_of(error) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("connection closed by the peer (g3/world, rank 0 with rank 1)"),
        RuntimeError("NCCL: remote process exited or there was a network error"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        LinkError("the link 1>0 broke while receiving: Connection closed by peer"),
        ValueError("CUDA error: said by the user"),
    ],
)
def test_what_is_not_of_a_device(error: Exception) -> None:
    assert kind_of(error) is None


def test_what_caused_an_error_counts() -> None:
    cause = accelerator(214, "uncorrectable ECC error encountered")
    wrapped = ModelError("the model could not be run")
    wrapped.__cause__ = cause
    fault = fault_of(wrapped)
    assert fault is not None
    assert (fault.error, fault.is_memory) == ("CUDA error: uncorrectable ECC error encountered", False)
    replaced = ValueError("in a handler")
    replaced.__context__ = cause
    assert kind_of(replaced) is Kind.BROKEN
    replaced.__suppress_context__ = True
    assert kind_of(replaced) is None


def test_a_hang_is_the_same_fault_whoever_waited_and_for_how_long() -> None:
    faults = [fault_of(DeviceError(f"rank {rank} waited {300 + rank} s for GPU {rank}: it hangs")) for rank in (0, 1)]
    assert [fault is not None and fault.error for fault in faults] == [HANGS, HANGS]


def test_a_fault_is_told_in_words() -> None:
    fault = fault_of(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB. Of the allocated memory 1 GiB is ..."))
    assert fault is not None
    assert fault.error == "CUDA out of memory. Tried 2 GiB."
    assert "lower micro_batch=" in in_words(fault)
    assert "Xid" in in_words(fault.model_copy(update={"is_memory": False, "device": "0102"}))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("a reader was killed by SIGKILL"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_host_without_memory_is_the_machines_matter(error: Exception) -> None:
    assert kind_of(error) is Kind.MACHINE


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.ETIMEDOUT, errno.ENOTCONN]
)
def test_a_disk_a_mount_or_a_network_that_fails_is_the_machines_matter(number: int) -> None:
    error = OSError(number, "it fails", "/data/x")
    fault = fault_of(error)
    assert kind_of(error) is Kind.MACHINE
    assert fault is not None
    assert (fault.of_machine, fault.is_memory, fault.device) == (True, False, "")
    assert "'/data/x'" in fault.error
    assert "Look at its disks, mounts, memory and network" in in_words(fault)


def test_what_a_script_asks_for_wrongly_is_its_own_matter(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "no").read_text()
    for error in (
        missing.value,
        PermissionError(errno.EACCES, "no"),
        IsADirectoryError(errno.EISDIR, "no"),
        OSError("no"),
    ):
        assert fault_of(error) is None


def test_under_the_dataset_a_machine_may_have_failed_and_elsewhere_our_own_words_stand() -> None:
    def caused(error: Exception) -> Exception:
        error.__cause__ = OSError(errno.EIO, "it fails")
        return error

    assert fault_of(caused(DataError("dataset[3] cannot be read"))) is not None
    assert fault_of(caused(ValueError("no picture"))) is not None
    assert fault_of(caused(CheckpointError("the folder cannot be read"))) is None
