"""Collect what a GPU machine without a network needs for ``gpu_session.py`` in one folder: ``make gpu-session``.

The machine has Python 3.12 on x86-64 with torch, transformers and pytest. The folder gets wheels of what else Varuna
imports; with the project itself they must be small enough to be carried. Then the session tries itself on the null GPU.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".gpu-session"
LARGEST_BYTES = 60 << 20
PYTHON = "3.12"
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2014", "1")
"""Versions of glibc, as the names of wheels have them, that run on the machine."""
PACKAGES = (
    *("annotated-types", "cffi", "cryptography>=43", "nccl4py>=0.6,<0.7", "obstore>=0.12,<0.13", "pycparser"),
    *("pydantic>=2.10,<3", "pytest>=9,<10", "starlette>=1,<2", "typer>=0.29,<0.30", "typing-extensions>=4.16"),
    *("typing-inspection", "uvicorn>=0.50,<1", "websockets>=15"),
)
"""pydantic-core comes in the version that pydantic names."""
COMMANDS = """On the GPU machine, in the project with that folder:
    python3 -m pip install --no-index --no-deps --no-compile --upgrade --target /tmp/site .gpu-session/*.whl
    PYTHONPATH=/tmp/site python3 benchmarks/gpu_session.py --out found"""


def _download(*packages: str) -> None:
    platforms = [
        word for glibc in GLIBC for word in ("--platform", f"manylinux{'_' if '_' in glibc else ''}{glibc}_x86_64")
    ]
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
    target = ("--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms)
    subprocess.run([*pip, *target, "--dest", str(FOLDER), *packages], check=True)


def _core_of_pydantic() -> str:
    """Return the exact requirement of the wheel that was downloaded."""
    from zipfile import ZipFile

    wheel = next(FOLDER.glob("pydantic-2*.whl"))
    with ZipFile(wheel) as file:
        metadata = next(name for name in file.namelist() if name.endswith("/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: pydantic-core=="))


def _project_bytes() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file())


def main() -> int:
    """Fill the folder and say how large it is; return 1 if it is too large."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    _download(*PACKAGES)
    _download(_core_of_pydantic())
    wheels = sum(wheel.stat().st_size for wheel in FOLDER.glob("*.whl"))
    whole = wheels + _project_bytes()
    print(
        f"{FOLDER.name}: {len(list(FOLDER.glob('*.whl')))} wheels, {wheels / 1e6:.1f} MB; {whole / 1e6:.1f} MB in all"
    )
    print(COMMANDS)
    if whole > LARGEST_BYTES:
        print(f"that is more than {LARGEST_BYTES / 1e6:.0f} MB, which is the most that is carried", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
