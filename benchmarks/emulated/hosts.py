"""Hosts with narrow lines between them, on this machine: network namespaces, and ranks that live in them.

    python -m benchmarks.emulated.hosts ADDRESS

serves the store where ranks that measure meet, until its standard input ends; it prints the port.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import isinf
from pathlib import Path

from tests.scenarios.network import NAMESPACE, Network
from varuna.calibration.samples import Measured
from varuna.measure.collect import FAILED
from varuna.measure.rendezvous import StoreHost

_BOUND_S = 600.0
_PORT = 29_500


class Hosts:
    """As many hosts as ranks need, each with one line, of one rate in each direction."""

    def __init__(self, ranks: int, per_host: int, bits_per_s: float, *, keeps_pace: bool = False) -> None:
        """Build them. Neighbouring ranks share a host, ``per_host`` of them; ``keeps_pace``: also after pauses.

        Lines without a limit are as wide as this machine makes them.
        """
        names = [f"h{number}" for number in range(-(-ranks // per_host))]
        self._network = Network(*names)
        self._of = [names[rank // per_host] for rank in range(ranks)]
        self._ports = iter(range(_PORT, _PORT + 1000))
        if not isinf(bits_per_s):
            self._network.shape(bits_per_s)
        if keeps_pace:
            self._network.keep_pace()

    def narrow(self, bits_per_s: float) -> None:
        """Change the rate of all lines."""
        for host in dict.fromkeys(self._of):
            self._network.narrow(host, bits_per_s)

    def close(self) -> None:
        """They are gone, with all that lives there."""
        self._network.close()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command that starts a process at the host of a rank."""
        namespace = self._network.environment(self._of[rank])[NAMESPACE]
        return ["nsenter", f"--net={namespace}", *command]

    def environment(self, rank: int, size: int, port: int) -> dict[str, str]:
        """Of a rank that meets the others at the first host."""
        addresses = self._network.addresses
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": addresses[self._of[0]],
            "MASTER_PORT": str(port),
            "VARUNA_INTERFACE": addresses[self._of[rank]],
            **self._network.environment(self._of[rank]),
        }

    def free_port(self) -> int:
        """Return a port on which nothing has listened yet."""
        return next(self._ports)

    def collect(self, script: Path, args: Sequence[str], workers: int) -> list[Measured]:
        """Measure as the workers of `varuna calibrate` do, each at its rank's host.

        Raises:
            RuntimeError: one failed.
        """
        with tempfile.TemporaryDirectory() as folder, self._store() as port:
            outputs = [Path(folder) / f"{rank}.json" for rank in range(workers)]
            measuring = [sys.executable, "-m", "varuna.measure"]
            processes = [
                subprocess.Popen(
                    self.command(rank, [*measuring, str(output), str(script), *args]),
                    env=self.environment(rank, workers, port),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                for rank, output in enumerate(outputs)
            ]
            try:
                deadline_s = time.monotonic() + _BOUND_S
                for process, output in zip(processes, outputs, strict=True):
                    said, _ = process.communicate(timeout=deadline_s - time.monotonic())
                    if process.returncode:
                        failed = output.with_suffix(FAILED)
                        why = failed.read_text() if failed.exists() else said.decode(errors="replace")[-3000:]
                        raise RuntimeError(f"a measuring worker failed:\n{why}")
            finally:
                for process in processes:
                    process.kill()
            return [Measured.model_validate_json(output.read_bytes()) for output in outputs]

    def run(self, module: str, args: Sequence[str], ranks: int, bound_s: float) -> None:
        """Run a benchmark's module once for each rank, where that lives, with ``--rank``.

        Raises:
            SystemExit: a rank failed, or did not end within the bound.
        """
        port = self.free_port()
        command = [sys.executable, "-m", module, *args, "--rank"]
        processes = [
            subprocess.Popen(self.command(rank, [*command, str(rank)]), env=self.environment(rank, ranks, port))
            for rank in range(ranks)
        ]
        try:
            deadline_s = time.monotonic() + bound_s
            for rank, process in enumerate(processes):
                if process.wait(deadline_s - time.monotonic()):
                    raise SystemExit(f"rank {rank} failed: see above")
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the ranks did not finish within {bound_s:.0f} s") from None
        finally:
            for process in processes:
                process.kill()

    @contextlib.contextmanager
    def _store(self) -> Iterator[int]:
        address = self._network.addresses[self._of[0]]
        serve = [sys.executable, "-m", "benchmarks.emulated.hosts", address]
        with subprocess.Popen(
            self.command(0, serve), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        ) as process:
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline())
            finally:
                process.kill()


def main() -> None:
    store = StoreHost(sys.argv[1])
    print(store.address()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
