"""From the facts of one machine to findings: would a run work here? Pure."""

import ipaddress
from collections.abc import Callable

from varuna.core.units import counted, format_bytes, format_duration, format_line
from varuna.core.version import OLDEST_TORCH, TORCH_RANGE, is_tested_torch, series
from varuna.extras.doctor.judging.facts import FolderFacts, GpuFacts, MachineFacts
from varuna.extras.doctor.judging.finding import Finding, fault, ok, warning

_INSTALL = f"Install what workers need: pip install 'torch{TORCH_RANGE}' safetensors numpy"
_FULL_BYTES = 16 << 20
_FULL_SHARE = 0.02
_FEW_BYTES = 1 << 30
_FEW_SHARED_BYTES = 1 << 30
_FEW_AVAILABLE_BYTES = 2 << 30
_FEW_FILES = 4096
_FEW_PROCESSES = 512
_FEW_PINNED_BYTES = 64 << 20
_SLOW_SYNC_S = 0.1
_SLOW_WRITE_BYTES_PER_S = 20e6
_SLOW_STORE_S = 1.0
_BUSY_GPU_BYTES = 1 << 30
_KINDS = 4


def judge_machine(facts: MachineFacts) -> tuple[Finding, ...]:
    """Return the findings of all checks, in the order in which a person would want to read them."""
    checks: tuple[Callable[[MachineFacts], list[Finding]], ...] = (
        *(_python, _torch, _gpus, _loopback, _memory, _limits, _address, _folders, _store, _cloud),
    )
    return tuple(finding for check in checks for finding in check(facts))


def speed(bytes_per_s: float) -> str:
    """Format bytes per second as ``format_line`` does."""
    return format_line(8 * bytes_per_s)


def delay(seconds: float) -> str:
    """``"45 µs"``, ``"1.2 ms"``; from a second on as other durations."""
    if seconds >= 1:
        return format_duration(seconds)
    return f"{seconds * 1e3:.2g} ms" if 1e-3 <= seconds < 0.1 else _outside_milliseconds(seconds)


def _outside_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.0f} ms"


def _python(facts: MachineFacts) -> list[Finding]:
    return [ok("python", f"{facts.python}, varuna {facts.varuna}")]


def _torch(facts: MachineFacts) -> list[Finding]:
    torch = facts.torch
    if torch.problem:
        more = " A machine that only manages does not need it." if not torch.version else ""
        return [fault("torch", torch.problem, f"{_INSTALL}.{more}")]
    if series(torch.version) < OLDEST_TORCH:
        text = f"{torch.version} is installed, but this Varuna needs torch{TORCH_RANGE}"
        return [fault("torch", text, _INSTALL)]
    if torch.missing:
        return [fault("torch", f"{torch.version}, but {' and '.join(torch.missing)} is missing", _INSTALL)]
    text = f"{torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPUs'}"
    if not is_tested_torch(torch.version):
        remedy = f"If a model cannot be captured: pip install 'torch{TORCH_RANGE}'"
        return [warning("torch", f"{text}; this Varuna was tested with torch{TORCH_RANGE}", remedy)]
    return [ok("torch", text)]


def _gpus(facts: MachineFacts) -> list[Finding]:
    torch, found = facts.torch, facts.gpus
    if facts.gpu_problem:
        remedy = "Install or repair NVIDIA's driver, until nvidia-smi lists the GPU. In a container: --gpus all."
        return [fault("gpu", facts.gpu_problem, remedy)]
    if not found:
        return [ok("gpu", f"none was found: training would use the {counted(facts.limits.cpus, 'CPU core')}")]
    first = found[0]
    names = " and ".join(sorted({f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in found})[:_KINDS])
    seen = f"{len(found)} x {names}, driver {first.driver}, compute mode {first.compute_mode}"
    hidden = facts.visible_gpus is not None
    if torch.problem:
        return [ok("gpu", seen)]
    if not torch.cuda:
        remedy = "Training would use CPUs. Install the build of torch for CUDA, see pytorch.org."
        return [warning("gpu", f"{seen}; torch {torch.version} is built for CPUs and cannot use them", remedy)]
    if torch.gpu_problem or (torch.gpus < len(found) and not hidden):
        text = torch.gpu_problem or f"torch can use {torch.gpus} of them"
        return [fault("gpu", f"{seen}; {text}", _gpu_remedy(first, torch.cuda))]
    limited = f"; CUDA_VISIBLE_DEVICES={facts.visible_gpus} leaves {torch.gpus}" if hidden else ""
    return [ok("gpu", seen + limited), *_taken(found)]


def _gpu_remedy(gpu: GpuFacts, cuda: str) -> str:
    if gpu.compute_mode == "Prohibited":
        return "The compute mode forbids it: sudo nvidia-smi --compute-mode=DEFAULT."
    return (
        f"Compare driver {gpu.driver} with what CUDA {cuda} needs, and look for a process that holds the GPU "
        "(nvidia-smi), or for errors of the driver (dmesg)."
    )


def _taken(gpus: tuple[GpuFacts, ...]) -> list[Finding]:
    found = []
    busy = [number for number, gpu in enumerate(gpus) if gpu.used_bytes > _BUSY_GPU_BYTES]
    if busy:
        used = format_bytes(max(gpus[number].used_bytes for number in busy))
        remedy = "Plans use what is free when a worker starts. nvidia-smi shows whose memory it is."
        text = f"up to {used} of GPU {', '.join(map(str, busy))} are in use by other processes"
        found.append(warning("gpu", text, remedy))
    if any(gpu.compute_mode.startswith("Exclusive") for gpu in gpus):
        remedy = "Keep --workers at one per GPU, or: sudo nvidia-smi --compute-mode=DEFAULT."
        found.append(warning("gpu", "the compute mode lets only one process use a GPU", remedy))
    return found


def _loopback(facts: MachineFacts) -> list[Finding]:
    link = facts.torch.link
    if link is None:
        return []
    if link.problem:
        remedy = "Workers of one machine talk over loopback: is the interface lo up, and does a firewall filter it?"
        return [fault("loopback", f"two workers of this machine cannot talk: {link.problem}", remedy)]
    nccl = f"; NCCL {facts.torch.nccl}" if facts.torch.nccl else ""
    return [ok("loopback", f"workers of this machine talk: {delay(link.latency_s)}, {speed(link.bytes_per_s)}{nccl}")]


def _memory(facts: MachineFacts) -> list[Finding]:
    limits = facts.limits
    found = []
    allowed = limits.container_bytes
    total = limits.memory_bytes
    is_bounded = allowed is not None and (total is None or allowed < 0.95 * total)
    cpus = limits.container_cpus
    cores = counted(limits.cpus, "CPU core")
    if cpus is not None and cpus < limits.cpus:
        cores = f"{cpus:g} of {cores} (the container's limit)"
    parts = [cores]
    if total is not None:
        parts.append(f"{format_bytes(total)} of memory")
    if is_bounded and allowed is not None:
        parts.append(f"of which this container may use {format_bytes(allowed)}")
    free = limits.available_bytes
    if free is not None:
        parts.append(f"{format_bytes(free)} available")
    text = ", ".join(parts)
    if free is not None and free < _FEW_AVAILABLE_BYTES:
        remedy = "A worker needs about 1 GiB before it holds any of the model. End other processes, or raise the limit."
        found.append(warning("memory", text, remedy))
    else:
        found.append(ok("memory", text))
    shared = limits.shared_bytes
    if shared is not None and shared < _FEW_SHARED_BYTES:
        remedy = "Processes that read samples use it (num_workers=). In Docker: --shm-size=8g; in Kubernetes: an "
        remedy += "emptyDir with medium: Memory at /dev/shm."
        found.append(warning("memory", f"/dev/shm has only {format_bytes(shared)}", remedy))
    return found


def _limits(facts: MachineFacts) -> list[Finding]:
    limits = facts.limits
    found, parts = [], []
    if limits.open_files is not None:
        parts.append(f"{limits.open_files:,} open files")
        if limits.open_files < _FEW_FILES:
            remedy = f"A manager needs some per worker: raise the hard limit (ulimit -Hn) to at least {_FEW_FILES}."
            found.append(warning("limits", f"processes may open only {limits.open_files:,} files", remedy))
    processes = min((n for n in (limits.processes, limits.container_processes) if n is not None), default=None)
    if processes is not None:
        parts.append(f"{processes:,} processes and threads")
        if processes < _FEW_PROCESSES:
            remedy = (
                "Each worker has dozens of threads: raise `ulimit -u`, or the container's pids limit (--pids-limit)."
            )
            found.append(warning("limits", f"only {processes:,} processes and threads are allowed", remedy))
    pinned = limits.pinned_bytes
    if facts.gpus and pinned is not None and pinned < _FEW_PINNED_BYTES:
        remedy = "InfiniBand needs it: ulimit -l unlimited, in Docker --ulimit memlock=-1. Ethernet does not."
        found.append(warning("limits", f"only {format_bytes(pinned)} of memory may be locked", remedy))
    return found or ([ok("limits", ", ".join(parts))] if parts else [])


def _address(facts: MachineFacts) -> list[Finding]:
    if not facts.address:
        return []
    try:
        is_loopback = ipaddress.ip_address(facts.resolves_to).is_loopback
    except ValueError:
        is_loopback = False
    text = f"{facts.name} is reached at {facts.address}"
    if is_loopback and facts.resolves_to != facts.address:
        text += f" (its name resolves to {facts.resolves_to}, which Varuna does not use)"
    return [ok("address", text)]


def _folders(facts: MachineFacts) -> list[Finding]:
    return [_folder(folder) for folder in facts.folders]


def is_full(free_bytes: int, size_bytes: int) -> bool:
    """Return whether a disk counts as full: less than 16 MiB are free, or, of a small one, 2 %."""
    return free_bytes < min(_FULL_BYTES, _FULL_SHARE * size_bytes)


def _folder(folder: FolderFacts) -> Finding:
    where = f"{folder.use} ({folder.path})"
    if folder.problem:
        remedy = "Give another folder, or make this one writable and free some space."
        return (fault if folder.needed else warning)("disk", f"{where}: {folder.problem}", remedy)
    text = f"{where}: {format_bytes(folder.free_bytes)} of {format_bytes(folder.size_bytes)} free"
    if folder.sync_s is not None:
        text += f", fsync {delay(folder.sync_s)}"
    if folder.write_bytes_per_s is not None:
        text += f", {format_bytes(folder.write_bytes_per_s)}/s"
    if is_full(folder.free_bytes, folder.size_bytes):
        return (fault if folder.needed else warning)("disk", text, "Free some space, or give another folder.")
    if folder.free_bytes < _FEW_BYTES:
        return warning("disk", text, "Free some space: a full disk stops logs first, then checkpoints.")
    if folder.sync_s is not None and folder.sync_s > _SLOW_SYNC_S:
        remedy = "Each step is written to the run's journal: put the run's folder (--run-dir) on a local disk."
        return warning("disk", f"{text}: slow", remedy)
    if folder.write_bytes_per_s is not None and folder.write_bytes_per_s < _SLOW_WRITE_BYTES_PER_S:
        return warning("disk", f"{text}: slow", "Checkpoints would take long: use a faster disk, or a bucket.")
    return ok("disk", text)


def _store(facts: MachineFacts) -> list[Finding]:
    store = facts.store
    if store is None:
        return []
    bad = [step for step in store.steps if step.problem]
    if bad:
        tried = ", ".join(f"{step.name}{' failed' if step.problem else ''}" for step in store.steps)
        remedy = "Checkpoints need all of it: write, read, list, conditional write and delete, in this place and below."
        return [fault("store", f"{store.url}: {bad[0].problem} ({tried})", remedy)]
    slowest = max((step.took_s for step in store.steps), default=0.0)
    tried = ", ".join(step.name for step in store.steps)
    text = f"{store.url}: {tried} work, {delay(slowest)} at most"
    if store.shared is False:
        remedy = "All machines save into one place. Use a bucket, or mount the same folder on all of them."
        return [fault("store", f"{store.url} is not shared: what the first machine wrote is not there", remedy)]
    if slowest > _SLOW_STORE_S:
        remedy = "Training does not wait for it, but checkpoints take longer. Is the bucket in another region?"
        return [warning("store", f"{text}: slow", remedy)]
    return [ok("store", text)]


def _cloud(facts: MachineFacts) -> list[Finding]:
    cloud = facts.cloud
    if cloud.answers:
        return [ok("cloud", f"{cloud.answers}: notices that this machine will be taken back can be heard")]
    if cloud.vendor:
        remedy = (
            "Agents would not hear that it will be taken back, and lose the step in flight. Let the metadata service "
            "(169.254.169.254) through; on AWS, containers need a hop limit of 2."
        )
        return [warning("cloud", f"this machine is {cloud.vendor}'s, but its metadata service does not answer", remedy)]
    return [ok("cloud", "no cloud's metadata service answers, as on machines of one's own")]
