"""The store where process groups meet: it lives with the manager, since it must outlive any worker."""

import threading
from typing import TYPE_CHECKING

from varuna.fleet.serving import bind

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class StoreHost:
    """Starts a store in the background: importing torch takes seconds in which workers can already start."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._store: TCPStore | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._start, name="varuna-store", daemon=True)
        self._thread.start()

    def address(self) -> tuple[str, int]:
        """Host and port, once it listens."""
        self._thread.join()
        if self._store is None:
            raise RuntimeError("the rendezvous store did not start") from self._error
        return self._host, self._store.port

    def _start(self) -> None:
        try:
            from torch._C._distributed_c10d import TCPStore

            # Given a socket, it listens there; left alone, on all interfaces, for everyone.
            listener = bind(self._host, 0)
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that asks for the address
            self._error = error
