"""The process that imports torch and tries links (``torch_process``), from outside: it may take long, hang or die."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time

from pydantic import ValidationError

from varuna.extras.doctor.judging.facts import FleetSums, LinkFacts, LinkOrder, TorchFacts

IMPORT_S = 60.0
"""From a cold network drive, torch takes most of it."""
_SUMS = ("TCP", "NCCL")


class TorchChild:
    """Starts at once; for one caller."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._lines: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "varuna.extras.doctor.links.torch_process"],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._read, name="varuna-torch", daemon=True).start()

    def facts(self, bound_s: float = IMPORT_S) -> TorchFacts:
        """Read what the process found out about torch."""
        line = self._next(bound_s)
        if line is None:
            return TorchFacts(problem=f"importing torch took more than {bound_s:.0f} s")
        try:
            return TorchFacts.model_validate_json(line)
        except ValidationError:
            return TorchFacts(problem=f"torch cannot be imported: {self._end()}")

    def links(self, ask: LinkOrder, bound_s: float) -> tuple[dict[str, LinkFacts], tuple[FleetSums, ...]]:
        """Return links from other machines, by their names, and sums over all; what is missing in the end is named."""
        deadline_s, doing = time.monotonic() + bound_s, ""
        links: dict[str, LinkFacts] = {}
        sums: list[FleetSums] = []
        try:
            assert self._process.stdin is not None
            print(ask.model_dump_json(), file=self._process.stdin, flush=True)
        except OSError:
            pass  # it has ended; so do its lines
        why = f"no answer within {bound_s:.0f} s"
        while (line := self._next(max(0.0, deadline_s - time.monotonic()))) is not None:
            if not line:
                why = f"the process that measures has ended: {self._end()}"
                break
            row = json.loads(line)
            doing = row["peer"]
            if row["found"] is None and not doing:
                return links, tuple(sums)
            if row["found"] is None:
                continue
            if doing in _SUMS:
                sums.append(FleetSums.model_validate(row["found"]))
            else:
                links[doing] = LinkFacts.model_validate(row["found"])
            doing = ""
        if doing in _SUMS:
            sums.append(FleetSums(how=doing, problem=why))
        elif doing:
            links[doing] = LinkFacts(problem=why)
        return links, tuple(sums)

    def close(self) -> None:
        """End the process for certain."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line.strip())
        except ValueError:
            return  # closed
        self._lines.put("")

    def _next(self, bound_s: float) -> str | None:
        """Return the next line; empty at the process's end, None after the bound."""
        try:
            return self._lines.get(timeout=bound_s)
        except queue.Empty:
            return None

    def _end(self) -> str:
        """Return the process's last words."""
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return "it said nothing"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1][:300] if said else f"exit code {code}"
