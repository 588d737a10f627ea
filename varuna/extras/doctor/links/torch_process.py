"""A process of its own that imports torch and tries links, since either may take long or hang.

``python -m varuna.extras.doctor.links.torch_process``: one JSON line each on standard output; what to do next comes as
a line on standard input, and its end ends the process.
"""

import json
import os
import sys
import threading
from importlib.util import find_spec
from typing import Any

from varuna.extras.doctor.judging.facts import FleetSums, LinkFacts, LinkOrder, TorchFacts

_NEEDED = ("safetensors", "numpy")
_LOCAL_S = 8.0


def main() -> None:
    """Tell of torch, then try the links to which a line on standard input leads."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    facts = _torch()
    print(facts.model_dump_json(), file=out)
    asked = sys.stdin.readline()
    if asked:
        from varuna.extras.doctor.links.pairs import try_links

        telling = threading.Lock()

        def tell(peer: str, found: "LinkFacts | FleetSums | None") -> None:
            row = {"peer": peer, "found": None if found is None else found.model_dump()}
            with telling:
                print(json.dumps(row), file=out)

        try_links(LinkOrder.model_validate_json(asked), tell)
        print(json.dumps({"peer": "", "found": None}), file=out)
    out.flush()
    os._exit(0)  # threads may still wait for a machine that is gone


def _torch() -> TorchFacts:
    if find_spec("torch") is None:
        return TorchFacts(problem="torch is not installed")
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return TorchFacts(problem=f"torch cannot be imported: {type(error).__name__}: {error}")
    missing = tuple(name for name in _NEEDED if find_spec(name) is None)
    gpus, gpu_problem, nccl = 0, "", ""
    if torch.version.cuda:
        gpus, gpu_problem = _gpus()
        from torch.cuda import nccl as library

        version: Any = library.version  # torch does not annotate it
        nccl = ".".join(map(str, version())) if torch.distributed.is_nccl_available() else ""
    return TorchFacts(
        version=torch.__version__,
        missing=missing,
        cuda=torch.version.cuda or "",
        gpus=gpus,
        gpu_problem=gpu_problem,
        nccl=nccl,
        link=_local_link() if not missing else None,
    )


def _gpus() -> tuple[int, str]:
    """Count the GPUs that add two numbers, and say what went wrong with the first that does not."""
    import torch

    count = torch.cuda.device_count()
    try:
        for number in range(count):
            assert int(torch.ones(2, device=f"cuda:{number}").sum()) == 2
    except (RuntimeError, AssertionError) as error:
        return count, f"GPU {number} does not compute: {str(error).splitlines()[0]}"
    return count, ""


def _local_link() -> LinkFacts:
    """Try two members on loopback, as workers of one machine are."""
    from varuna.engine.base.transport import local_store, prefixed
    from varuna.extras.doctor.links.pairs import pair

    store, found = local_store(), []

    def one(place: int) -> None:
        found.append(pair(lambda name: prefixed(name, store), place, "127.0.0.1"))

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in (0, 1)]
    for thread in threads:
        thread.start()
    threads[0].join(_LOCAL_S)
    return found[0] if found else LinkFacts(problem=f"no answer within {_LOCAL_S:.0f} s")


if __name__ == "__main__":
    main()
