"""Every error that Varuna raises on purpose.

::

    VarunaError
    ├── UsageError           a call, flag or environment variable is wrong         exit code 2
    ├── NoPlanError          no P x D x m fits the workers or their memory         exit code 3
    ├── ModelError           the model cannot be captured, split or weighed
    ├── DataError            the dataset disagrees with itself or with the model
    │   └── OtherSampleError     two ranks have read different samples at one index
    ├── DivergedError        the loss or the gradients are not finite
    ├── CheckpointError      a checkpoint cannot be written, read or trusted
    │   ├── DamagedCheckpoint    its bytes are not those that were written; an older one may be intact
    │   └── StoreError           an operation on a directory or object store failed
    │       ├── ObjectMissing        there is no object of that name
    │       ├── ObjectExists         there is one already, which must not be replaced
    │       └── StoreUnavailable     it does not answer now, but may later
    ├── DeviceError          a GPU hangs
    ├── FleetError           the manager refused, disappeared or could not start
    ├── WorkerError          a worker's script failed
    └── LinkError            a peer did not answer in time, or its link broke

Messages say what was needed, what was found, and what to do next.
"""


class VarunaError(Exception):
    """Root of all errors raised on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 1


class UsageError(VarunaError):
    """A call, a flag or an environment variable is wrong."""

    exit_code = 2


class NoPlanError(VarunaError):
    """No plan fits the available workers or their memory."""

    exit_code = 3


class ModelError(VarunaError):
    """The model cannot be captured, split or weighed, or it differs from plain PyTorch."""


class DataError(VarunaError):
    """The dataset disagrees with itself or with the model."""


class OtherSampleError(DataError):
    """Two ranks have read different samples at one index of the dataset."""

    def __init__(self, text: str, rank: int) -> None:
        """Name the other rank."""
        super().__init__(text)
        self.rank = rank


class DivergedError(VarunaError):
    """The loss or the gradients of a step are not finite."""


class CheckpointError(VarunaError):
    """A checkpoint cannot be written, read or trusted."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's bytes are not those that were written. It can never be used, but an older one may be intact."""


class StoreError(CheckpointError):
    """An operation on a directory or object store failed."""


class ObjectMissing(StoreError):
    """The store has no object of that name."""


class ObjectExists(StoreError):
    """The store has an object of that name, which must not be replaced."""


class StoreUnavailable(StoreError):
    """The store does not answer now, but may later."""


class DeviceError(VarunaError):
    """A GPU hangs: what it was given does not end."""


class FleetError(VarunaError):
    """The manager refused this worker, disappeared or could not start."""


class WorkerError(VarunaError):
    """A worker's script failed."""


class LinkError(VarunaError):
    """A peer did not answer in time, or its link broke."""
