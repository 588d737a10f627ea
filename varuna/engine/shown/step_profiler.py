"""PyTorch's profiler around some steps of this worker, on request."""

import gzip
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from varuna.core.messages import PROFILE_PART_BYTES, PROFILE_PARTS, ProfilePart, ProfileSteps
from varuna.core.units import format_bytes
from varuna.process.threads import start


class StepProfiler:
    """Asked by the membership's thread; starts and stops on the training thread; what it saw is told by another.

    Args:
        tell: sends an answer.
        device: that the stage computes on.
    """

    def __init__(self, tell: Callable[[ProfilePart], None], device: torch.device) -> None:
        self._tell, self._device, self._lock = tell, device, threading.Lock()
        self._asked: ProfileSteps | None = None
        self._running: tuple[ProfileSteps, Any] | None = None
        self._writing: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether this step is profiled: what it takes is not what steps take."""
        return self._running is not None

    def request_profile(self, request: ProfileSteps) -> None:
        """Profile these steps; one request at a time."""
        with self._lock:
            is_busy = self._asked is not None or self._running is not None
            if not is_busy:
                self._asked = request
        if is_busy:
            self._refuse(request, "this worker has another profile to make first. Ask again when that is done")

    def before(self, step: int) -> None:
        """Note that a step begins."""
        asked = self._asked
        if asked is None or step < asked.first:
            return
        with self._lock:
            self._asked = None
        if step > asked.first:
            self._refuse(asked, f"step {asked.first} is over: this worker is at step {step}. Ask for a later one")
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._running = asked, profile

    def after(self, step: int) -> None:
        """Note that a step is over, and so may be the profile."""
        if self._running is not None and step >= self._running[0].last:
            (request, profile), self._running = self._running, None
            profile.stop()
            self._writing = start("profile", lambda: self._write(request, profile))

    def abandon(self, why: str) -> None:
        """Give up a profile: the generation or the run ends in the middle of the steps."""
        running, asked = self._running, self._asked
        self._running = self._asked = None
        if running is not None:
            running[1].stop()
        if (ended := running[0] if running is not None else asked) is not None:
            self._refuse(ended, why)

    def finish(self, bound_s: float) -> None:
        """Wait until what was seen has been told."""
        if self._writing is not None:
            self._writing.join(bound_s)

    def _write(self, request: ProfileSteps, profile: Any) -> None:
        """Compress and send the trace, on a thread of its own, beside the training."""
        try:
            with tempfile.TemporaryDirectory(prefix="varuna-profile-") as folder:
                path = Path(folder) / "trace.json"
                profile.export_chrome_trace(str(path))
                data = gzip.compress(path.read_bytes(), compresslevel=6)
        except Exception as error:  # noqa: BLE001 - PyTorch's, or a full disk: the person who asked should know
            self._refuse(request, f"PyTorch's profiler failed: {type(error).__name__}: {error}")
            return
        most_bytes = PROFILE_PART_BYTES * PROFILE_PARTS
        if len(data) > most_bytes:
            self._refuse(
                request,
                f"the trace has {format_bytes(len(data))}, more than {format_bytes(most_bytes)}. Ask for fewer steps",
            )
            return
        parts = [data[at : at + PROFILE_PART_BYTES] for at in range(0, len(data), PROFILE_PART_BYTES)]
        for number, part in enumerate(parts):
            self._tell(ProfilePart(first=request.first, number=number, count=len(parts), data=part))

    def _refuse(self, request: ProfileSteps, why: str) -> None:
        self._tell(ProfilePart(first=request.first, number=0, count=1, failure=why[:1000]))
