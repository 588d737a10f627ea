"""Whether a device still gets anything done: calls to one that hangs do not return, and no error ever says so.

Host threads wait for it in many places, also inside of torch. So a thread of its own asks it for a sign of life now and
then, and another one, which never touches the device, ends the process if there is none for as long as a step may take.
"""

from collections.abc import Callable

from varuna.core.devices import DeviceFacts
from varuna.engine.base.inbox import Inbox
from varuna.engine.device.streams import Streams
from varuna.process.threads import start


class Pulse:
    """Watches the device of one generation, until that is over."""

    def __init__(self, streams: Streams, inbox: Inbox, hangs: Callable[[DeviceFacts | None, str], None]) -> None:
        """Start the threads; for the thread that computes.

        Args:
            streams: of the device.
            inbox: of the generation.
            hangs: ends this process, whose device this is, and says why.
        """
        self._streams, self._inbox, self._hangs = streams, inbox, hangs
        self._stream, self._looks, self._is_asked = streams.computing(), 0, False
        start("device-pulse", self._ask)
        start("device-bound", self._look)

    def _ask(self) -> None:
        try:
            while not self._inbox.over.wait(self._inbox.patience.look_s):
                self._is_asked = True
                self._streams.record_event(self._stream).wait()
                self._is_asked, self._looks = False, 0
        except Exception as error:  # noqa: BLE001 - the training thread may not call the device for long, and then raises it
            self._inbox.abort(error)

    def _look(self) -> None:
        look_s = self._inbox.patience.look_s
        while not self._inbox.over.wait(look_s):
            self._looks += self._is_asked  # looks, not seconds: a process that is stopped does not look
            if self._looks * look_s >= self._inbox.stalled_s:
                what = f"{title(self._streams)} has not finished in {self._looks * look_s:.0f} s what it was given"
                self._hangs(self._streams.memory(), f"{self._inbox.who}: {what}, so it hangs.")
                return


def title(streams: Streams) -> str:
    """Name a device in texts."""
    facts = streams.memory()
    return f"GPU {facts.name}" if facts is not None else "the device"
