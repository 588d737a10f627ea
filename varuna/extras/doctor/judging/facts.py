"""Facts about machines before a run: values that travel to the first machine, which judges all of them."""

from pydantic import Field

from varuna.core.value import Value


class GpuFacts(Value):
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int
    used_bytes: int
    driver: str
    compute_mode: str


class TorchFacts(Value):
    """Findings of a separate process that imported torch."""

    version: str = ""
    problem: str = ""
    """reason why it cannot be imported, or told nothing; empty if it could"""
    missing: tuple[str, ...] = ()
    """packages that workers need beside it"""
    cuda: str = ""
    """that it was built with; empty for a build for CPUs"""
    gpus: int = 0
    """that it can use"""
    gpu_problem: str = ""
    """problems met when each GPU was to add two numbers"""
    nccl: str = ""
    link: "LinkFacts | None" = None
    """TCP between two threads of that process"""


class FolderFacts(Value):
    """A folder that a run writes to."""

    use: str
    path: str
    needed: bool = True
    """a run fails without it"""
    free_bytes: int = 0
    size_bytes: int = 0
    sync_s: float | None = None
    """to write 4 KiB so that they survive a power cut"""
    write_bytes_per_s: float | None = None
    """None: there was too little room, or too little time, to try"""
    problem: str = ""


class StoreStep(Value):
    """An operation on the store of checkpoints."""

    name: str
    took_s: float
    problem: str = ""


class StoreFacts(Value):
    """The store of checkpoints, tried."""

    url: str
    steps: tuple[StoreStep, ...] = ()
    shared: bool | None = None
    """whether it has what the first machine wrote; None: it was not asked"""


class LimitFacts(Value):
    """Limits on what processes of this machine may use. None: no limit, or none that this system tells of."""

    cpus: int
    memory_bytes: int | None = None
    available_bytes: int | None = None
    container_cpus: float | None = None
    container_bytes: int | None = None
    container_processes: int | None = None
    shared_bytes: int | None = None
    """size of /dev/shm"""
    open_files: int | None = None
    processes: int | None = None
    pinned_bytes: int | None = None
    """memory that may be locked"""


class CloudFacts(Value):
    """The cloud that this machine is on."""

    vendor: str = ""
    """by its firmware; empty: none that is known"""
    answers: str = ""
    """the cloud whose metadata service answers; empty: none"""


class MachineFacts(Value):
    """One machine."""

    name: str
    varuna: str
    python: str
    address: str = ""
    """at which others reach its workers"""
    resolves_to: str = ""
    """the address of its own name; empty: none"""
    torch: TorchFacts
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str = ""
    """reason why the driver told nothing, although there is a device of NVIDIA's"""
    visible_gpus: str | None = None
    """CUDA_VISIBLE_DEVICES"""
    folders: tuple[FolderFacts, ...] = ()
    store: StoreFacts | None = None
    limits: LimitFacts
    cloud: CloudFacts = CloudFacts()
    starts_slowly: bool = False
    """TCP forgets in pauses how fast a connection was; False also if this system does not tell"""
    clock_ahead_s: float = 0.0
    """compared with the first machine's"""


class LinkFacts(Value):
    """Messages from one machine to another, by TCP."""

    latency_s: float = 0.0
    """of the smallest message, one way"""
    bytes_per_s: float = 0.0
    problem: str = ""
    """reason why there is no figure; empty if there is"""


class ReachFacts(Value):
    """A connection from one machine to a free port of another one."""

    took_s: float = 0.0
    problem: str = ""


class FleetSums(Value):
    """Sums over all machines, as gradients are added."""

    how: str
    """TCP or NCCL"""
    size_bytes: int = 0
    took_s: float = 0.0
    problem: str = ""


class FleetFacts(Value):
    """The machines that have met, in the order in which they came."""

    wanted: int
    machines: tuple[MachineFacts, ...]
    others: dict[str, str] = Field(default_factory=dict)
    """machines with another version of Varuna, by name"""
    lost: dict[str, str] = Field(default_factory=dict)
    """machines that stopped answering, with what they were doing"""
    reaches: dict[str, dict[str, ReachFacts]] = Field(default_factory=dict)
    """by who connects, and to whom"""
    links: dict[str, dict[str, LinkFacts]] = Field(default_factory=dict)
    """by who receives, and from whom"""
    sums: dict[str, tuple[FleetSums, ...]] = Field(default_factory=dict)
    """by who tells"""


class LinkOrder(Value):
    """Request to try links, for the machine that is number ``rank``."""

    host: str
    port: int
    certificate_pem: str
    token: str
    rank: int
    address: str
    """to bind to"""
    names: tuple[str, ...]
    """of all machines, by rank"""
    pairs: tuple[tuple[int, int], ...]
    """that can connect to each other, the smaller rank first"""
    nccl: bool
    """all have GPUs that torch can use"""
