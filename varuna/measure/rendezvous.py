"""The store where workers that measure meet, on loopback; it lives in the process that started them."""

import threading
from typing import TYPE_CHECKING

from varuna.core.errors import FleetError
from varuna.fleet.net.serving import bind

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

START_S = 300.0
"""Bound on starting: importing torch takes seconds, from a cold network drive minutes."""


class StoreHost:
    """Starts a store in the background: importing torch takes seconds in which workers can already start."""

    def __init__(self, host: str = "127.0.0.1", start_s: float = START_S) -> None:
        self._host, self._start_s = host, start_s
        self._store: TCPStore | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._start, name="varuna-store", daemon=True)
        self._thread.start()

    def address(self) -> tuple[str, int]:
        """Host and port; waits until the store listens.

        Raises:
            FleetError: it cannot be started, or does not start within five minutes.
        """
        self._thread.join(self._start_s)
        if self._error is not None:
            raise FleetError(
                f"the store where workers meet cannot start on {self._host}: {self._error}. It needs torch and "
                "an address of this machine."
            ) from self._error
        if self._store is None:
            raise FleetError(
                f"the store where workers meet did not start within {self._start_s:.0f} s. Run `python -c 'import "
                "torch'` on this machine to see whether the import hangs."
            )
        return self._host, self._store.port

    def _start(self) -> None:
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            # Given a socket, it listens there; left alone, on all interfaces, for everyone.
            listener = bind(self._host, 0)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that asks for the address
            self._error = error
