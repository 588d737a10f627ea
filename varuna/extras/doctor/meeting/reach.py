"""Whether machines can connect to each other's free ports, each in its own direction."""

import contextlib
import errno
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial

from varuna.extras.doctor.judging.facts import ReachFacts
from varuna.fleet.net.serving import bind
from varuna.process.bounded import Bounded

CONNECT_S = 3.0
_NONCE_BYTES = 16
_WHY = {
    errno.ECONNREFUSED: "refused: nobody listens there, so that address leads to another machine",
    errno.EHOSTUNREACH: "no route to that host",
    errno.ENETUNREACH: "no route to that network",
}


class ProbePort:
    """A free port at which this machine answers those that know the secret of the meeting."""

    def __init__(self, address: str, secret: str) -> None:
        """Listen at ``address``.

        Raises:
            FleetError: it is not one of this machine's.
        """
        self._secret, self._listener = secret.encode(), bind(address, 0)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._answer, name="varuna-door", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread waits on it
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:
                return
            with guest:
                guest.settimeout(CONNECT_S)
                try:
                    guest.sendall(_proof(self._secret, _read(guest, _NONCE_BYTES)))
                except OSError:
                    continue


def try_all(doors: Mapping[str, tuple[str, int]], secret: str, source: str) -> dict[str, ReachFacts]:
    """Connect to all doors (address and port, by machine) at once, from the address ``source``."""
    trying = {name: Bounded(partial(_try, door, secret.encode(), source)) for name, door in doors.items()}
    found = {}
    deadline_s = time.monotonic() + 3 * CONNECT_S
    for name, work in trying.items():
        try:
            found[name] = work.take(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            found[name] = ReachFacts(problem=f"no answer within {3 * CONNECT_S:.0f} s")
    return found


def _try(door: tuple[str, int], secret: bytes, source: str) -> ReachFacts:
    begin_s = time.monotonic()
    try:
        with socket.create_connection(door, CONNECT_S, (source, 0)) as connection:
            took_s = time.monotonic() - begin_s
            nonce = hashlib.sha256(f"{door}{begin_s}".encode()).digest()[:_NONCE_BYTES]
            connection.sendall(nonce)
            if not hmac.compare_digest(_read(connection, 32), _proof(secret, nonce)):
                return ReachFacts(problem="another process answers there: the address is not that machine's alone")
    except TimeoutError:
        return ReachFacts(problem=f"no answer within {CONNECT_S:.0f} s: packets are dropped, as by a firewall")
    except OSError as error:
        return ReachFacts(problem=_WHY.get(error.errno or 0, f"{error.strerror or error}"))
    return ReachFacts(took_s=took_s)


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("the connection was closed")
        found += part
    return found


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, "sha256")
