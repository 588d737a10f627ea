"""``python -m tests.other_torch 2.15.0``: what depends on torch's inside, tested with another version of torch.

The version lies in ``.torch/2.15.0``, in front of the one in ``.venv``, which stays. It is PyPI's build, on Linux for
CUDA, with empty libraries in place of NVIDIA's (``tests/null_gpu``): it says that there is no GPU, and computes on the
CPU as it would on a machine of a user's. ``--prepare`` stops there; ``--null-gpu`` runs ``tests/null_gpu`` instead, on
two GPUs whose kernels do nothing, and ``--run SCRIPT ...`` a script on one.
"""

import argparse
import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

from tests.null_gpu.build import RUNTIME, build
from varuna.core.version import is_tested_torch

ROOT = Path(__file__).parents[1]

OLDEST, NEWEST = "2.11.0", "2.15.0"
"""The ends of the range, which ``make nightly`` tries."""

SENSITIVE = ("partition", "membership", "checkpoint", "engine")
"""Of ``tests/unit``: what looks into torch, and what changes when it computes otherwise."""


def folder_of(version: str) -> Path:
    """Return where a version of torch lies."""
    return ROOT / ".torch" / version


def environment(version: str, gpus: int = 0) -> dict[str, str]:
    """Return an environment in which this version is imported, and sees so many null GPUs."""
    folder = folder_of(version)
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "LD_LIBRARY_PATH": str(folder / "torch" / "lib")}
    return {**os.environ, **paths, "NULL_GPUS": str(gpus)}


def is_prepared(version: str) -> bool:
    """Whether it is there, with the empty libraries as they are now."""
    stamp = folder_of(version) / ".installed"
    return stamp.exists() and stamp.read_text() == _libraries()


def _libraries() -> str:
    """Return what changes with the empty libraries."""
    return hashlib.blake2b(RUNTIME.read_bytes() + Path(inspect.getfile(build)).read_bytes()).hexdigest()


def prepare(version: str) -> Path:
    """Install a version beside ``.venv``; nothing to do when it is there."""
    folder = folder_of(version)
    stamp = folder / ".installed"
    if is_prepared(version):
        return folder
    if not stamp.exists():
        _install(folder, f"torch=={version}")
    cuda = _cuda_of(version)
    if cuda:
        major = cuda.partition(".")[0]
        if not (folder / "headers").exists():
            _install(folder / "headers", *(f"nvidia-cuda-{part}=={major}.*" for part in ("runtime", "crt")))
        found = next((folder / "headers").glob("nvidia/*/include/cuda_runtime_api.h"))
        build(folder / "torch" / "lib", found.parent)
    stamp.write_text(_libraries())
    return folder


def _install(folder: Path, *packages: str) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade")
    subprocess.run([*pip, "--target", str(folder), *packages], check=True)


def _cuda_of(version: str) -> str:
    """Return the version of CUDA that it is built for; empty on CPUs."""
    names: dict[str, object] = {}
    exec((folder_of(version) / "torch" / "version.py").read_text(), names)
    return str(names["cuda"] or "")


def run(version: str, *python: str, gpus: int = 0) -> int:
    """Run Python with this version of torch, so many null GPUs and these arguments; return its exit status."""
    command = [sys.executable, *python]
    return subprocess.run(command, cwd=ROOT, env=environment(version, gpus), check=False).returncode


def main() -> int:
    """Run the tests; return their exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.other_torch", description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--prepare", action="store_true", help="install it only")
    parser.add_argument(
        "--null-gpu", action="store_true", help="what needs a CUDA device, on one that computes nothing"
    )
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="SCRIPT", help="with its arguments, on a null GPU")
    parser.add_argument("--field", type=int, default=0, metavar="N", help="then judge N jobs of the field")
    arguments = parser.parse_args()
    if not is_tested_torch(arguments.version):
        print(f"torch {arguments.version} is outside of the range in varuna/core/version.py", file=sys.stderr)
    print(f"torch {arguments.version} in {prepare(arguments.version).relative_to(ROOT)}", flush=True)
    if arguments.prepare:
        return 0
    if arguments.run:
        return run(arguments.version, *arguments.run, gpus=1)
    pytest = ("-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal")
    if arguments.null_gpu:
        if not _cuda_of(arguments.version):
            print(f"torch {arguments.version} is built for CPUs here: there is no CUDA to run without a GPU")
            return 0
        return run(arguments.version, *pytest, "tests/null_gpu", gpus=2)
    status = run(arguments.version, *pytest, *(str(Path("tests/unit") / name) for name in SENSITIVE))
    if status or not arguments.field:
        return status
    sample = ("--sample", str(arguments.field), "--briefly", "--at-once", "2")
    return run(arguments.version, "-m", "tests.field", "--fresh", *sample)


if __name__ == "__main__":
    sys.exit(main())
