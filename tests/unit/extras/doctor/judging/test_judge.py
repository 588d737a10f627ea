"""Findings about machines before a run."""

from typing import Any

import pytest

from varuna.extras.doctor.judging.facts import (
    CloudFacts,
    FleetFacts,
    FleetSums,
    FolderFacts,
    GpuFacts,
    LimitFacts,
    LinkFacts,
    MachineFacts,
    ReachFacts,
    StoreFacts,
    StoreStep,
    TorchFacts,
)
from varuna.extras.doctor.judging.finding import Finding, Severity, is_healthy
from varuna.extras.doctor.judging.judge_fleet import judge_fleet
from varuna.extras.doctor.judging.judge_machine import delay, judge_machine, speed
from varuna.extras.doctor.judging.pauses import lost_s

GIB = 1 << 30
GPU = GpuFacts(name="H100", memory_bytes=80 * GIB, used_bytes=0, driver="550.54", compute_mode="Default")
TORCH = TorchFacts(version="2.13.0+cu128", cuda="12.8", gpus=1, nccl="2.27.5", link=LinkFacts(bytes_per_s=1e9))
LIMITS = LimitFacts(cpus=16, memory_bytes=128 * GIB, available_bytes=100 * GIB, shared_bytes=64 * GIB, open_files=65536)
WELL = MachineFacts(
    name="a",
    varuna="0.1.0",
    python="3.11.7",
    address="10.0.0.1",
    torch=TORCH,
    gpus=(GPU,),
    folders=(FolderFacts(use="checkpoints", path="/ck", free_bytes=GIB << 6, size_bytes=GIB << 7, sync_s=1e-3),),
    limits=LIMITS,
)


def torch(**changes: Any) -> MachineFacts:
    return WELL.model_copy(update={"torch": TORCH.model_copy(update=changes)})


def gpu(**changes: Any) -> MachineFacts:
    return WELL.model_copy(update={"gpus": (GPU.model_copy(update=changes),)})


def limits(**changes: Any) -> MachineFacts:
    return WELL.model_copy(update={"limits": LIMITS.model_copy(update=changes)})


def folder(**changes: Any) -> MachineFacts:
    return WELL.model_copy(update={"folders": (WELL.folders[0].model_copy(update=changes),)})


def store(*steps: StoreStep, shared: bool | None = None) -> MachineFacts:
    return WELL.model_copy(update={"store": StoreFacts(url="s3://b", steps=steps, shared=shared)})


def with_(**changes: Any) -> MachineFacts:
    return WELL.model_copy(update=changes)


def worst(findings: tuple[Finding, ...], subject: str) -> Finding:
    levels = list(Severity)
    return max((each for each in findings if each.subject == subject), key=lambda each: levels.index(each.level))


def test_of_a_machine_that_is_well_nothing_is_to_be_done() -> None:
    findings = judge_machine(WELL)
    assert {each.level for each in findings} == {Severity.OK}
    assert not any(each.remedy for each in findings)
    assert "driver 550.54, compute mode Default" in worst(findings, "gpu").text
    without = judge_machine(with_(gpus=()))
    assert worst(without, "gpu").text == "none was found: training would use the 16 CPU cores"


FAULT, WARNING, OK = Severity.FAULT, Severity.WARNING, Severity.OK
CASES: dict[str, tuple[MachineFacts, str, Severity, str]] = {
    "no torch": (with_(torch=TorchFacts(problem="torch is not installed")), "torch", FAULT, "is not installed"),
    "old torch": (torch(version="2.8.0"), "torch", FAULT, "2.8.0 is installed"),
    "older torch than tested": (torch(version="2.10.0+cpu"), "torch", WARNING, "tested with torch>=2.11,<2.16"),
    "newest torch tested": (torch(version="2.15.1+cu132"), "torch", OK, "2.15.1"),
    "newer torch": (torch(version="2.16.0"), "torch", WARNING, "tested with torch>=2.11,<2.16"),
    "no version of torch": (torch(version="unknown"), "torch", FAULT, "unknown is installed"),
    "no numpy": (torch(missing=("numpy",)), "torch", FAULT, "numpy is missing"),
    "no driver": (with_(gpus=(), gpu_problem="no nvidia-smi"), "gpu", FAULT, "nvidia-smi"),
    "torch for CPUs": (torch(cuda="", gpus=0), "gpu", WARNING, "built for CPUs"),
    "old driver": (torch(gpus=0), "gpu", FAULT, "torch can use 0"),
    "hidden GPUs": (with_(visible_gpus="", torch=TORCH.model_copy(update={"gpus": 0})), "gpu", OK, "leaves 0"),
    "broken GPU": (torch(gpu_problem="GPU 0 does not compute: ECC"), "gpu", FAULT, "ECC"),
    "busy GPU": (gpu(used_bytes=9 * GIB), "gpu", WARNING, "9 GiB of GPU 0"),
    "exclusive GPU": (gpu(compute_mode="Exclusive_Process"), "gpu", WARNING, "only one process"),
    "no loopback": (torch(link=LinkFacts(problem="refused")), "loopback", FAULT, "cannot talk"),
    "a container": (limits(container_bytes=8 * GIB, container_cpus=2.5), "memory", OK, "container may use 8 GiB"),
    "little memory": (limits(available_bytes=GIB), "memory", WARNING, "1 GiB available"),
    "Docker's shm": (limits(shared_bytes=64 << 20), "memory", WARNING, "/dev/shm has only 64 MiB"),
    "few files": (limits(open_files=1024), "limits", WARNING, "1,024 files"),
    "few processes": (limits(processes=90_000, container_processes=100), "limits", WARNING, "only 100"),
    "few pinned": (limits(pinned_bytes=8 << 20), "limits", WARNING, "8 MiB"),
    "Debian's name": (with_(resolves_to="127.0.1.1"), "address", OK, "127.0.1.1, which Varuna does not use"),
    "full disk": (folder(problem="cannot write: No space left on device"), "disk", FAULT, "No space"),
    "unwritable here": (folder(problem="cannot write", needed=False), "disk", WARNING, "cannot write"),
    "nearly full disk": (folder(free_bytes=100 * 2**20), "disk", WARNING, "100 MiB of"),
    "disk without room": (folder(free_bytes=1000), "disk", FAULT, "1000 B of"),
    "slow fsync": (folder(sync_s=0.5), "disk", WARNING, "fsync 500 ms"),
    "slow disk": (folder(write_bytes_per_s=1e6), "disk", WARNING, "slow"),
    "no right to delete": (
        store(StoreStep(name="write", took_s=0.1), StoreStep(name="delete", took_s=0.1, problem="denied")),
        *("store", FAULT, "denied (write, delete failed)"),
    ),
    "not shared": (store(StoreStep(name="write", took_s=0.1), shared=False), "store", FAULT, "is not shared"),
    "far bucket": (store(StoreStep(name="write", took_s=3.0), shared=True), "store", WARNING, "3.0 s at most: slow"),
    "deaf": (with_(cloud=CloudFacts(vendor="AWS")), "cloud", WARNING, "does not answer"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_well_is_said_with_a_remedy(case: str) -> None:
    facts, subject, level, said = CASES[case]
    findings = judge_machine(facts)
    found = worst(findings, subject)
    assert (found.level, said in found.text) == (level, True), found
    assert bool(found.remedy) is (level is not OK)
    assert is_healthy(findings) is (level is not FAULT)


def fleet(*names: str, **changes: Any) -> FleetFacts:
    machines = tuple(with_(name=name, address=f"10.0.0.{n}") for n, name in enumerate(names, 1))
    every = {to: {by: LinkFacts(latency_s=2e-4, bytes_per_s=1.2e9) for by in names if by != to} for to in names}
    facts = FleetFacts(
        wanted=len(names),
        machines=machines,
        reaches={by: {to: ReachFacts(took_s=1e-4) for to in names if to != by} for by in names},
        links=every,
        sums={name: (FleetSums(how="TCP", size_bytes=1 << 20, took_s=0.01),) for name in names},
    )
    return facts.model_copy(update=changes)


def changed(facts: FleetFacts, name: str, **changes: Any) -> FleetFacts:
    machines = tuple(each.model_copy(update=changes) if each.name == name else each for each in facts.machines)
    return facts.model_copy(update={"machines": machines})


def test_of_machines_that_are_well_figures_are_shown() -> None:
    findings = judge_fleet(fleet("a", "b", "c"))
    assert {each.level for each in findings} == {OK}
    assert worst(findings, "links").text == "6 links: 9.6 Gb/s to 9.6 Gb/s, 200 µs to 200 µs (TCP, one way)"
    assert "1 MiB summed over 3 machines in 10 ms" in [each.text for each in findings]


def test_a_machine_that_did_not_come_is_gone_or_is_another_version_is_a_fault() -> None:
    short = fleet("a", "b").model_copy(update={"wanted": 3})
    assert worst(judge_fleet(short), "machines").text == "only 2 of 3 machines came"
    other = short.model_copy(update={"others": {"c": "0.2.0"}})
    assert "c has varuna 0.2.0, the first machine 0.1.0" in worst(judge_fleet(other), "versions").text
    lost = fleet("a", "b", lost={"b": "while links were measured (6 s ago)"})
    assert "b stopped answering while links" in worst(judge_fleet(lost), "machines").text
    assert not is_healthy(judge_fleet(lost))


def test_what_differs_between_machines_is_a_warning() -> None:
    python = worst(judge_fleet(changed(fleet("a", "b", "c"), "c", python="3.12.1")), "versions")
    assert (python.level, python.text) == (WARNING, "Python differs: 3.11 on a and b; 3.12 on c")
    mixed = worst(judge_fleet(changed(fleet("a", "b"), "b", gpus=())), "versions")
    assert mixed.text == "not all have GPUs: 1 GPUs on a; no GPU on b"


@pytest.mark.parametrize(("ahead_s", "level"), [(0.5, OK), (-90.0, WARNING), (3600.0, FAULT)])
def test_clocks_are_compared(ahead_s: float, level: Severity) -> None:
    found = worst(judge_fleet(changed(fleet("a", "b"), "b", clock_ahead_s=ahead_s)), "clock")
    assert found.level is level
    assert level is OK or "the clock of b" in found.text


def test_a_direction_that_is_blocked_is_named_and_so_is_a_machine_that_nobody_reaches() -> None:
    open_ = fleet("a", "b", "c")
    dropped = ReachFacts(problem="no answer within 3 s")
    one = {**open_.reaches, "c": {**open_.reaches["c"], "b": dropped}}
    found = [each for each in judge_fleet(fleet("a", "b", "c", reaches=one)) if each.level is FAULT]
    text = "c cannot connect to b (10.0.0.2): no answer within 3 s; b can connect to c"
    assert [each.text for each in found] == [text]
    whole = {by: {to: dropped if to == "b" else found for to, found in row.items()} for by, row in one.items()}
    found = [each for each in judge_fleet(fleet("a", "b", "c", reaches=whole)) if each.level is FAULT]
    assert [each.text for each in found] == ["no machine can connect to b (10.0.0.2): no answer within 3 s"]


def test_a_slow_link_is_named_beside_what_is_usual() -> None:
    facts = fleet("a", "b", "c", "d")
    slow = {**facts.links, "d": {**facts.links["d"], "a": LinkFacts(latency_s=0.03, bytes_per_s=1e7)}}
    findings = judge_fleet(fleet("a", "b", "c", "d", links=slow))
    found = [each.text for each in findings if each.subject == "links" and each.level is WARNING]
    usual = "half of all links have at least 9.6 Gb/s and at most 200 µs"
    assert found == [f"a to d: 80 Mb/s, 30 ms; {usual}"]
    assert is_healthy(findings)
    away = {**facts.links["d"], **dict.fromkeys(("a", "b", "c"), LinkFacts(latency_s=2e-4, bytes_per_s=1e7))}
    findings = judge_fleet(fleet("a", "b", "c", "d", links={**facts.links, "d": away}))
    found = [each.text for each in findings if each.subject == "links" and each.level is WARNING]
    assert found == [f"all links to d are slow, with at most 80 Mb/s; {usual}"]


def test_machines_whose_connections_begin_slowly_are_named_where_that_costs_something() -> None:
    near = changed(fleet("a", "b", "c"), "a", starts_slowly=True)
    assert not [each for each in judge_fleet(near) if each.subject == "tcp"]
    far = {**near.links, "b": {**near.links["b"], "a": LinkFacts(latency_s=0.01, bytes_per_s=1.25e8)}}
    found = [each for each in judge_fleet(near.model_copy(update={"links": far})) if each.subject == "tcp"]
    [slow] = found
    assert slow.level is WARNING
    assert slow.text == (
        "1 link begins slowly after a pause: from a to b (1 Gb/s, 10 ms) the next message takes up to 129 ms longer"
    )
    assert slow.remedy == "As root, on a: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    back = {**near.links, "a": {**near.links["a"], "b": LinkFacts(latency_s=0.01, bytes_per_s=1.25e8)}}
    assert not [each for each in judge_fleet(near.model_copy(update={"links": back})) if each.subject == "tcp"], (
        "b, which sends there, does not begin slowly"
    )
    every = fleet("a", "b", "c", links={to: dict.fromkeys(row, far["b"]["a"]) for to, row in near.links.items()})
    every = every.model_copy(
        update={"machines": tuple(each.model_copy(update={"starts_slowly": True}) for each in every.machines)}
    )
    [slow] = [each for each in judge_fleet(every) if each.subject == "tcp"]
    assert slow.text.startswith("6 links begin slowly after a pause")
    assert slow.remedy.startswith("As root, on a, b and c: sysctl")


def test_what_a_pause_costs_is_the_time_until_enough_is_under_way() -> None:
    """At 14,480 bytes and twice as much with each round trip, as TCP counts, against a connection in its stride."""
    for link in (LinkFacts(latency_s=0.05, bytes_per_s=1e8), LinkFacts(latency_s=0.004, bytes_per_s=3e7)):
        round_trip_s, sent, window, trips = 2 * link.latency_s, 0.0, 14_480.0, 0
        while window < link.bytes_per_s * round_trip_s:
            sent, window, trips = sent + window, 2 * window, trips + 1
        counted_s = trips * round_trip_s - sent / link.bytes_per_s
        assert lost_s(link) == pytest.approx(counted_s, abs=round_trip_s)
    assert lost_s(LinkFacts(latency_s=1e-4, bytes_per_s=1e7)) == 0.0, "ten segments are enough"
    assert lost_s(LinkFacts(latency_s=0.0, bytes_per_s=1e9)) == 0.0


def test_a_link_and_a_sum_that_fail_are_faults() -> None:
    facts = fleet("a", "b")
    broken = {"a": {"b": LinkFacts(problem="reset")}, "b": {"a": LinkFacts(problem="reset")}}
    found = [each for each in judge_fleet(fleet("a", "b", links=broken)) if each.level is FAULT]
    assert [each.text for each in found] == ["between a and b: reset"]
    sums = {**facts.sums, "b": (FleetSums(how="NCCL", problem="no answer within 8 s"),)}
    assert "failed on b: no answer" in worst(judge_fleet(fleet("a", "b", sums=sums)), "nccl").text


def test_figures_are_short() -> None:
    assert [speed(value) for value in (1.25e9, 1e6, 100.0)] == ["10 Gb/s", "8 Mb/s", "0.8 kb/s"]
    assert [delay(value) for value in (4.5e-5, 1.23e-3, 0.25, 2.0)] == ["45 µs", "1.2 ms", "250 ms", "2.0 s"]
