"""Cases that ``simulator_accuracy.py`` predicts and runs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """The job and the network that a calibration is of."""

    model: str
    network: str
    workers: int
    """at once"""
    mbits_per_s: int = 0
    """of each host's line; 0: all ranks are on one host"""
    per_host: int = 1
    width: int = 4096
    tied: bool = False
    reduction: str = "fp32"
    is_mixed: bool = False
    """some ranks take longer for everything, by a factor"""
    slower: float = 1.0
    """the factor, of all ranks"""

    @property
    def name(self) -> str:
        if not self.mbits_per_s:
            return f"{self.network},mixed" if self.is_mixed else self.network
        parts = [f"{self.mbits_per_s}Mb/s", f"w{self.width}" if self.model == "slept" else ""]
        parts += ["tied" if self.tied else "", self.reduction if self.reduction != "fp32" else ""]
        return ",".join(filter(None, [*parts, f"{self.per_host}/host" if self.per_host > 1 else ""]))

    def arguments(self, global_batch: int, micro_batch: int) -> list[str]:
        found = ["--model", self.model, "--network", self.network, "--reduction", self.reduction]
        found += ["--width", str(self.width), "--slower", str(self.slower), *(["--tied"] if self.tied else [])]
        return [*found, "--global-batch", str(global_batch), "--micro-batch", str(micro_batch)]


@dataclass(frozen=True)
class Case:
    """One configuration."""

    setting: Setting
    stages: int
    replicas: int
    policy: str
    micro_batch: int
    global_batch: int
    depths: tuple[int, ...] = ()
    """of the pipelines, deepest first, if they differ"""
    fast: int = 0
    """ranks of full speed, of a mix; 0: it is none. With ``stages`` of 0, pipelines run on both classes"""
    slow: int = 0

    @property
    def ranks(self) -> int:
        return self.fast + self.slow or sum(self.depths) or self.stages * self.replicas

    @property
    def name(self) -> str:
        shape = "+".join(map(str, self.depths)) or f"{self.stages}x{self.replicas}"
        if self.fast:
            how = f"P={self.stages}" if self.stages else "spanning"
            shape = f"{self.fast}+{self.slow}slow,{how}"
        return f"{self.setting.model} {shape} m={self.micro_batch} {self.policy} {self.setting.name}"


def on_one_host() -> list[Case]:
    """Real compute with as many ranks as there are cores; slept compute on emulated networks."""
    one, two = Setting("gpt2", "none", 1), Setting("gpt2", "none", 2)
    mid = Setting("gpt2", "mid", 2)
    real = [
        Case(one, 1, 1, "varuna", 1, 16),
        Case(one, 1, 1, "varuna", 2, 16),
        Case(two, 2, 1, "varuna", 2, 32),
        Case(two, 2, 1, "adaptive", 2, 32),
        Case(two, 2, 1, "gpipe", 2, 32),
        Case(two, 1, 2, "varuna", 2, 32),
        Case(mid, 2, 1, "varuna", 2, 32),
        Case(mid, 2, 1, "gpipe", 2, 32),
    ]
    slept = []
    for network in ("none", "mid", "bad"):
        setting = Setting("slept", network, 8)
        slept += [
            Case(setting, 8, 1, "varuna", 2, 48),
            Case(setting, 4, 2, "adaptive", 2, 48),
            Case(setting, 8, 1, "gpipe", 2, 48),
        ]
    slept += [Case(Setting("slept", "mid", 8), 2, 4, "varuna", 2, 48)]
    for network, depths in (("none", (3, 2)), ("none", (4, 3)), ("mid", (3, 2)), ("mid", (4, 3)), ("mid", (3, 3, 2))):
        slept.append(Case(Setting("slept", network, 8), depths[0], len(depths), "varuna", 2, 24 * len(depths), depths))
    slept += [Case(Setting("slept", network, 8), 2, 2, "varuna", 2, 48) for network in ("none", "mid")]
    for network in ("none", "mid"):
        mixed = Setting("slept", network, 6, is_mixed=True)
        slept += [
            Case(mixed, stages, 0, "varuna", 2, 48, fast=fast, slow=slow)
            for stages, fast, slow in ((1, 2, 4), (2, 2, 4), (3, 3, 3), (0, 1, 3), (0, 2, 4))
        ]
    return [*real, *slept]


def on_hosts() -> list[Case]:
    """Messages and sums of several sizes, on lines of several widths."""

    def each(shapes: str, mbits_per_s: int, *, batch: int = 16, model: str = "slept", **more: Any) -> list[Case]:
        pairs = [(int(shape[0]), int(shape[2])) for shape in shapes.split()]
        workers = max(stages * replicas for stages, replicas in pairs)
        setting = Setting(model, "none", workers, mbits_per_s, **more)
        return [Case(setting, stages, replicas, "varuna", 2, batch) for stages, replicas in pairs]

    every = "2x1 3x1 4x1 1x2 2x2 1x4"
    return [
        *each(every, 20),
        *each(every, 100, width=65536),
        *each("2x1 4x1 2x2", 100, width=65536, tied=True),
        *each("1x2 2x2 1x4", 100, width=65536, reduction="bf16"),
        *each("4x1 2x2 1x4", 100, width=65536, per_host=2),
        *each(every, 1000, width=65536),
        *each("4x1 2x2 1x4", 10_000, width=65536),
        *each("2x1 1x2", 20, model="gpt2", batch=32),
        *each("2x1 1x2", 100, model="gpt2", batch=32),
    ]
