"""From the facts of all machines that have met to findings: would a run over all of them work? Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from varuna.core.units import counted, format_bytes, format_duration
from varuna.extras.doctor.judging.facts import FleetFacts, LinkFacts, MachineFacts
from varuna.extras.doctor.judging.finding import NAMED, Finding, fault, listed, ok, warning
from varuna.extras.doctor.judging.judge_machine import delay, judge_machine, speed
from varuna.extras.doctor.judging.pauses import judge_pauses

CLOCK_SKEW_S = 5.0
_CLOCK_BROKEN_S = 900.0
"""Object stores refuse requests of machines whose clocks are further off."""
_SLOW_SHARE = 1 / 3
"""of the median of all links: slower ones are named"""
_LATE_FACTOR, _LATE_S = 5.0, 2e-3
_OPEN = (
    "Workers listen on free ports, between themselves: open all TCP ports between these machines, both ways, or give "
    "--interface an address that leads there."
)


def judge_fleet(facts: FleetFacts) -> tuple[Finding, ...]:
    """Judge what each machine says of itself, then what only all of them together show."""
    return (*_machines(facts), *_met(facts), *_versions(facts.machines), *_clocks(facts.machines), *judge_links(facts))


def judge_links(facts: FleetFacts) -> tuple[Finding, ...]:
    """Judge whether all can talk to all, and how fast."""
    return (*_reaches(facts), *_speeds(facts), *judge_pauses(facts), *_sums(facts))


def _machines(facts: FleetFacts) -> Iterator[Finding]:
    for machine in facts.machines:
        for finding in judge_machine(machine):
            yield replace(finding, machine=machine.name)


def _met(facts: FleetFacts) -> Iterator[Finding]:
    came = len(facts.machines) + len(facts.others)
    if came < facts.wanted:
        remedy = "Start `varuna doctor JOIN` on the others while this command waits. Do they reach this machine's port?"
        yield fault("machines", f"only {came} of {counted(facts.wanted, 'machine')} came", remedy)
    for name, version in facts.others.items():
        here = facts.machines[0].varuna if facts.machines else ""
        text = f"{name} has varuna {version}, the first machine {here}"
        yield fault("versions", text, "All machines of a run need the same version of Varuna.")
    for name, doing in facts.lost.items():
        remedy = "Look at that machine: did it go down, was the command ended there, is its network cut?"
        yield fault("machines", f"{name} stopped answering {doing}", remedy)
    names = ", ".join(machine.name for machine in facts.machines)
    if came >= facts.wanted and not facts.lost and not facts.others:
        yield ok("machines", f"all {came} came: {names}")


def _versions(machines: Sequence[MachineFacts]) -> Iterator[Finding]:
    kinds = {
        "Python": {machine.name: machine.python.rpartition(".")[0] for machine in machines},
        "torch": {machine.name: machine.torch.version for machine in machines if machine.torch.version},
    }
    is_same = True
    for what, found in kinds.items():
        if len(set(found.values())) > 1:
            is_same = False
            remedy = "The same everywhere is what was tested: use one image, or one lock file, for all machines."
            yield warning("versions", f"{what} differs: {_grouped(found)}", remedy)
    with_gpus = {machine.name: f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU" for machine in machines}
    kinds_of_gpu = {gpu.name for machine in machines for gpu in machine.gpus}
    if len({bool(machine.gpus) for machine in machines}) > 1:
        remedy = "A pipeline is as fast as its slowest stage: leave out the machines without a GPU."
        yield warning("versions", f"not all have GPUs: {_grouped(with_gpus)}", remedy)
    elif len(kinds_of_gpu) > 1:
        remedy = "A plan assumes equal GPUs: it is as slow as the slowest, and fits into the smallest."
        yield warning("versions", f"GPUs differ: {', '.join(sorted(kinds_of_gpu))}", remedy)
    if is_same and machines:
        yield ok("versions", "the same varuna, Python and torch on all machines")


def _grouped(found: Mapping[str, str]) -> str:
    """``"2.13.0 on a and b; 2.12.1 on c"``."""
    by_value: dict[str, list[str]] = {}
    for name, value in found.items():
        by_value.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {listed(names)}" for value, names in by_value.items())


def _clocks(machines: Sequence[MachineFacts]) -> Iterator[Finding]:
    worst_s = 0.0
    for machine in machines:
        off_s = machine.clock_ahead_s
        worst_s = max(worst_s, abs(off_s))
        if abs(off_s) > CLOCK_SKEW_S:
            way = "ahead of" if off_s > 0 else "behind"
            text = f"the clock of {machine.name} is {format_duration(abs(off_s))} {way} the first machine's"
            remedy = "Run NTP (chrony, systemd-timesyncd). Buckets, certificates and logs depend on clocks."
            if abs(off_s) > _CLOCK_BROKEN_S:
                yield fault("clock", f"{text}: buckets refuse its requests", remedy)
            else:
                yield warning("clock", text, remedy)
    if len(machines) > 1 and worst_s <= CLOCK_SKEW_S:
        yield ok("clock", f"all within {delay(worst_s)} of the first machine's")


def _reaches(facts: FleetFacts) -> Iterator[Finding]:
    addresses = {machine.name: machine.address for machine in facts.machines}
    blocked = {
        (source, target): found.problem
        for source, row in facts.reaches.items()
        for target, found in row.items()
        if found.problem
    }
    for target in addresses:
        sources = [source for source, to in blocked if to == target]
        asked = [source for source, row in facts.reaches.items() if target in row]
        if len(sources) > 1 and len(sources) == len(asked):
            text = f"no machine can connect to {target} ({addresses[target]}): {blocked[sources[0], target]}"
            yield fault("ports", text, _OPEN)
            continue
        for source in sources:
            back = facts.reaches.get(target, {}).get(source)
            one_way = f"; {target} can connect to {source}" if back is not None and not back.problem else ""
            text = f"{source} cannot connect to {target} ({addresses[target]}): {blocked[source, target]}{one_way}"
            yield fault("ports", text, _OPEN)
    if facts.reaches and not blocked:
        tried = sum(len(row) for row in facts.reaches.values())
        yield ok("ports", f"a free port of each machine is reached from each other one ({tried} connections)")


def _speeds(facts: FleetFacts) -> Iterator[Finding]:
    links = {(a, b): link for b, row in facts.links.items() for a, link in row.items()}
    good = {pair: link for pair, link in links.items() if not link.problem}
    for (a, b), link in links.items():
        if link.problem and (a < b or (b, a) not in links):  # both ends tell the same story
            remedy = (
                "The machines connect, but messages do not get through: look for firewalls that inspect, and at MTUs."
            )
            yield fault("links", f"between {a} and {b}: {link.problem}", remedy)
    if not good:
        return
    typical, usual_s = (
        median(link.bytes_per_s for link in good.values()),
        median(link.latency_s for link in good.values()),
    )
    slow = dict(sorted(_outliers(good, typical, usual_s), key=lambda row: row[1].bytes_per_s))
    usual = f"half of all links have at least {speed(typical)} and at most {delay(usual_s)}"
    for end, way in ((0, "from"), (1, "to")):
        for name in dict.fromkeys(pair[end] for pair in good):
            own = [pair for pair in good if pair[end] == name]
            if len(own) > 1 and all(pair in slow for pair in own):
                best = max(slow[pair].bytes_per_s for pair in own)
                slow = {pair: link for pair, link in slow.items() if pair not in own}
                text = f"all links {way} {name} are slow, with at most {speed(best)}; {usual}"
                remedy = (
                    "A step waits for its slowest link: leave that machine out, or look at its network card and zone."
                )
                yield warning("links", text, remedy)
    for (a, b), link in list(slow.items())[:NAMED]:
        text = f"{a} to {b}: {speed(link.bytes_per_s)}, {delay(link.latency_s)}; {usual}"
        yield warning("links", text, "A step waits for its slowest link. Is one of them in another zone?")
    if len(slow) > NAMED:
        yield warning("links", f"{len(slow) - NAMED} more links are as slow", "--json shows all of them.")
    rates = [link.bytes_per_s for link in good.values()]
    delays = [link.latency_s for link in good.values()]
    text = f"{counted(len(good), 'link')}: {speed(min(rates))} to {speed(max(rates))}, "
    yield ok("links", f"{text}{delay(min(delays))} to {delay(max(delays))} (TCP, one way)")


def _outliers(
    links: Mapping[tuple[str, str], LinkFacts], typical: float, usual_s: float
) -> Iterator[tuple[tuple[str, str], LinkFacts]]:
    for pair, link in links.items():
        is_late = link.latency_s > max(_LATE_S, _LATE_FACTOR * usual_s)
        if link.bytes_per_s < _SLOW_SHARE * typical or is_late:
            yield pair, link


def _sums(facts: FleetFacts) -> Iterator[Finding]:
    by_kind: dict[str, list[tuple[str, str, float, int]]] = {}
    for name, sums in facts.sums.items():
        for each in sums:
            by_kind.setdefault(each.how, []).append((name, each.problem, each.took_s, each.size_bytes))
    for how, rows in by_kind.items():
        subject = "nccl" if how == "NCCL" else "sums"
        bad = [(name, problem) for name, problem, _, _ in rows if problem]
        if bad:
            remedy = "Each pair of machines was tried before: see what it says of links."
            if how == "NCCL":
                remedy = "Set NCCL_DEBUG=INFO and run this again; NCCL_SOCKET_IFNAME names the network interface."
            yield fault(subject, f"the sum over all machines failed on {bad[0][0]}: {bad[0][1]}", remedy)
        else:
            took_s, size_bytes = max((took_s, size) for _, _, took_s, size in rows)
            text = f"{format_bytes(size_bytes)} summed over {counted(len(rows), 'machine')} in {delay(took_s)}"
            yield ok(subject, text)
