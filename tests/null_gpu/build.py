"""Empty libraries in place of NVIDIA's, so that torch's CUDA build can be loaded anywhere: 0.5 GB in place of 4."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

RUNTIME = Path(__file__).parent / "runtime.cpp"
_LOADED_LATER = ("libcuda.so.1", "libnvidia-ml.so.1")
"""By torch, by their names."""
_NVIDIA = re.compile(r"_*cu|nccl|nv")


def build(libraries: Path, headers: Path) -> None:
    """Make what torch's libraries need and do not find, beside them.

    Args:
        libraries: torch's folder ``lib``.
        headers: of the CUDA runtime, of the same major version.
    """
    ours = libraries / "libnullcuda.so"
    torchs = [path for path in sorted(libraries.glob("*.so")) if "torch" in path.name or "c10" in path.name]
    wanted, versions = _undefined([*torchs, *libraries.glob("libcaffe2*.so")])
    work = libraries / "null"
    work.mkdir(exist_ok=True)
    compiled = work / "runtime.o"
    _run("g++", "-std=c++17", "-O2", "-fPIC", "-w", f"-I{headers}", "-c", str(RUNTIME), "-o", str(compiled))
    known = {line.split()[-1] for line in _run("nm", "--defined-only", "-g", str(compiled)).splitlines()}
    source = work / "libraries.c"
    source.write_text("\n".join(["void null_gpu_launched(int);", *map(_does_nothing, sorted(wanted - known))]))
    _run("gcc", "-O1", "-fPIC", "-w", "-c", str(source), "-o", str(work / "libraries.o"))
    _run("g++", "-shared", "-o", str(ours), str(compiled), str(work / "libraries.o"), "-lpthread")
    for name in sorted({*_missing(torchs, libraries), *_LOADED_LATER}):
        empty = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--no-as-needed"]
        if versions[name]:
            script = work / f"{name}.map"
            script.write_text("".join(f"{version} {{ }};\n" for version in sorted(versions[name])))
            empty.append(f"-Wl,--version-script={script}")
        where = ("-Wl,-rpath,$ORIGIN", f"-L{libraries}", "-lnullcuda")
        _run("gcc", *empty, "-o", str(libraries / name), "-x", "c", "/dev/null", "-x", "none", *where)


def _does_nothing(name: str) -> str:
    if re.search(r"gemm|matmul$", name, re.IGNORECASE):
        return f"long {name}() {{ null_gpu_launched(1); return 0; }}"
    return f"long {name}() {{ return 0; }}"


def _undefined(libraries: list[Path]) -> tuple[set[str], defaultdict[str, set[str]]]:
    """Return NVIDIA's symbols that they need, and by library the names of versions of symbols."""
    names, versions = set(), defaultdict[str, set[str]](set)
    for line in _run("nm", "-D", "--undefined-only", *map(str, libraries)).splitlines():
        name = line.split()[-1].partition("@")[0] if line.strip() else ""
        if _NVIDIA.match(name):
            names.add(name)
    for path in libraries:
        library = ""
        for line in _run("readelf", "--wide", "--version-info", str(path)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            elif (found := re.search(r"Name: (\S+)", line)) and "Flags" in line:
                versions[library].add(found[1])
    return names, versions


def _missing(libraries: list[Path], folder: Path) -> set[str]:
    """Return names of libraries that these need and that are NVIDIA's."""
    needed = set()
    for path in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(path))))
    return {name for name in needed if name.startswith(("libcu", "libnccl", "libnv"))}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ... failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
