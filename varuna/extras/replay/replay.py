"""A whole replay: the trace in, totals out, for morphing and for restarting jobs."""

from collections import Counter
from collections.abc import Callable

from varuna.calibration.format import Calibrations
from varuna.core.devices import WorkerGroups, equal_workers
from varuna.core.errors import NoPlanError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.saved import young_s
from varuna.extras.replay.broken_steps import BrokenSteps
from varuna.extras.replay.costs import MorphCosts, RestartCosts
from varuna.extras.replay.job import job_of, state_bytes
from varuna.extras.replay.lost import Account, LostBy
from varuna.extras.replay.report import ReplayOutcome, Stretch
from varuna.extras.replay.simulated_cluster import SimulatedCluster
from varuna.extras.replay.trace import Trace
from varuna.fleet.state.run_events import GenerationRecord, GenerationStarted, Morphed, RunEvent, StepRecorded
from varuna.planner.choose import plan_run


class Plans:
    """The planner for one job; m is chosen once, for the largest cluster of the trace, and kept.

    Raises:
        NoPlanError: not even the largest number of workers can run the job.
    """

    def __init__(self, job: JobFacts, calibrations: Calibrations, most_workers: int, *, copies: bool = False) -> None:
        self._job, self._calibrations, self._copies = job, calibrations, copies
        self._known: dict[tuple[WorkerGroups, float], Plan | NoPlanError] = {}
        first = plan_run(job, workers=equal_workers(most_workers), calibrations=calibrations, copies=True)
        self.micro_batch = first.micro_batch

    def __call__(self, job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        """Return the best plan for at most these workers, at the job's rate of losses.

        Raises:
            NoPlanError: none fits.
        """
        asked = workers, job.losses_per_hour
        if asked not in self._known:
            try:
                self._known[asked] = plan_run(
                    self._job.model_copy(update={"losses_per_hour": job.losses_per_hour}),
                    workers=workers,
                    calibrations=self._calibrations,
                    micro_batch=self.micro_batch,
                    copies=self._copies,
                )
            except NoPlanError as error:
                self._known[asked] = error
        found = self._known[asked]
        if isinstance(found, NoPlanError):
            raise found
        return found

    def step_s(self, workers: int) -> float:
        """Return the seconds of a step of the fastest plan; infinite if there is none."""
        try:
            return self(self._job, equal_workers(workers), None).step_s if workers else float("inf")
        except NoPlanError:
            return float("inf")


class Replay:
    """One job on one trace.

    Args:
        trace: when nodes come and go.
        calibrations: of the model on the hardware; its price, if any, makes dollars.
        gpus_per_node: workers of each node.
        global_batch: M, examples per step.
        micro_batch: m, if it is fixed.

    Raises:
        NoPlanError: the whole cluster could not run the job.
        UsageError: the trace has no node.
    """

    def __init__(
        self,
        trace: Trace,
        calibrations: Calibrations,
        *,
        gpus_per_node: int,
        global_batch: int,
        micro_batch: int | None = None,
    ) -> None:
        if trace.most_nodes < 1 or trace.end_s <= 0:
            raise UsageError("nothing to replay: the trace has no nodes, or no duration.")
        self._trace, self._calibrations, self._gpus = trace, calibrations, gpus_per_node
        self._job: JobFacts = job_of(calibrations, global_batch, micro_batch)
        self._plans = Plans(self._job, calibrations, trace.most_nodes * gpus_per_node)

    @property
    def ideal_samples(self) -> float:
        """Return the samples of instant, lossless morphs that are always on the best plan."""
        return sum(
            (end_s - begin_s) * self._job.global_batch / self._plans.step_s(nodes * self._gpus)
            for begin_s, end_s, nodes in self._trace.spans()
        )

    def _ideal_per_s(self, workers: int) -> float:
        """Return samples per second of the fastest plan for a number of workers."""
        step_s = self._plans.step_s(workers)
        return self._job.global_batch / step_s if step_s else 0.0

    def morphing(self, costs: MorphCosts | None = None, *, notice_s: float = 0.0) -> ReplayOutcome:
        """Replay with the real state machine; with ``notice_s``, nodes are warned that long before they go."""
        costs = costs or MorphCosts()
        history = _History(self._trace)
        account = Account(self._ideal_per_s)
        plans = Plans(self._job, self._calibrations, self._trace.most_nodes * self._gpus, copies=costs.copies)
        cluster = SimulatedCluster(
            self._job,
            plans,
            costs,
            BrokenSteps(self._job, self._calibrations),
            most_workers=self._trace.most_nodes * self._gpus,
            link_bytes_per_s=self._calibrations.first.across_vms.link.bytes_per_s,
            on_event=history.add_event,
            account=account,
        )
        for at_s, act in self._acts(cluster, notice_s):
            cluster.run_until(at_s)
            act()
        cluster.run_until(self._trace.end_s)
        steps = cluster.fleet.recorded.step + 1
        account.note_vain(LostBy.UNDONE, history.undone * self._job.global_batch)
        account.note_vain(LostBy.UNFINISHED, cluster.unfinished * self._job.global_batch)
        lost = account.closed(self._trace.end_s, steps * self._job.global_batch)
        return self._outcome(
            "morph",
            steps=steps,
            redone=sum(record.steps_redone for record in cluster.fleet.history),
            kept=sum(record.kept_micro_batches for record in cluster.fleet.history),
            training_s=cluster.training_s,
            lost={cause.value: samples for cause, samples in lost.items()},
            morphs=history.kinds,
            stretches=history.stretches(self._trace.end_s),
            checkpoints_s=tuple(cluster.checkpoints_s),
        )

    def _acts(self, cluster: SimulatedCluster, notice_s: float) -> list[tuple[float, Callable[[], None]]]:
        """Return the cloud's actions, in time order."""
        acts: list[tuple[float, Callable[[], None]]] = []
        added_s: dict[str, float] = {}
        for change in self._trace.changes:
            for node in change.removed:
                acts.append((change.at_s, lambda node=node: cluster.remove(node)))  # type: ignore[misc]
                if notice_s > 0:
                    warn = lambda node=node, at_s=change.at_s: cluster.warn(node, at_s)  # noqa: E731
                    acts.append((max(added_s[node], change.at_s - notice_s), warn))
            for node in change.added:
                added_s[node] = change.at_s
                acts.append((change.at_s, lambda node=node: cluster.add(node, self._gpus)))  # type: ignore[misc]
        return sorted(acts, key=lambda act: act[0])

    def restarting(self, costs: RestartCosts | None = None) -> ReplayOutcome:
        """Replay a job that restarts at each change; a loss from the last checkpoint, a gain from a new one."""
        costs = costs or RestartCosts()
        losses = sum(bool(change.removed) for change in self._trace.changes)
        between_s = self._trace.end_s / max(1, losses)
        plan = self._plans(self._job, equal_workers(self._trace.most_nodes * self._gpus), None)
        snapshot_s = sum(state_bytes(self._job)) / plan.workers / costs.snapshot_bytes_per_s
        every_s = young_s(snapshot_s, between_s)
        done = saved = undone = 0
        training_s = 0.0
        kinds: Counter[str] = Counter()
        stretches: list[Stretch] = []
        for change, (begin_s, end_s, nodes) in zip(self._trace.changes, self._trace.spans(), strict=True):
            if change.removed:
                undone, done = undone + done - saved, saved
            saved = done
            kinds["loss" if change.removed else "gain"] += 1
            ready_s = saved_s = begin_s + costs.restart_s
            step_s = self._plans.step_s(nodes * self._gpus)
            now_s = ready_s
            while now_s + step_s <= end_s:
                now_s += step_s
                done += 1
                training_s += step_s
                if now_s + step_s / 2 >= saved_s + every_s:
                    saved, saved_s = done, now_s
                    now_s += snapshot_s
            running = (
                None if step_s == float("inf") else self._plans(self._job, equal_workers(nodes * self._gpus), None)
            )
            stretches.append(Stretch(begin_s=begin_s, end_s=min(end_s, ready_s), nodes=nodes, kind="restart"))
            if ready_s < end_s:
                stretches.append(Stretch(begin_s=ready_s, end_s=end_s, nodes=nodes, plan=running, kind="restart"))
        return self._outcome(
            "restart",
            steps=done,
            redone=undone,
            training_s=training_s,
            morphs=dict(kinds),
            stretches=tuple(stretches),
            checkpoints_s=(),
        )

    def _outcome(
        self,
        policy: str,
        *,
        steps: int,
        redone: int,
        kept: int = 0,
        training_s: float,
        lost: dict[str, float] | None = None,
        morphs: dict[str, int],
        stretches: tuple[Stretch, ...],
        checkpoints_s: tuple[float, ...],
    ) -> ReplayOutcome:
        duration_s, price = self._trace.end_s, self._calibrations.first.hardware.price_per_hour
        ideal = self.ideal_samples  # 0 where the nodes that hold the model come as the recording ends
        gpu_hours = sum((end - begin) * nodes for begin, end, nodes in self._trace.spans()) * self._gpus / 3600.0
        shares: dict[str, float] = {}
        for stretch in stretches:
            shape = stretch.plan.shape if stretch.plan else "none"
            shares[shape] = shares.get(shape, 0.0) + (stretch.end_s - stretch.begin_s) / duration_s
        return ReplayOutcome(
            policy=policy,
            global_batch=self._job.global_batch,
            micro_batch=self._plans.micro_batch,
            duration_s=duration_s,
            steps=steps,
            samples=steps * self._job.global_batch,
            ideal_samples=ideal,
            steps_redone=redone,
            micro_batches_kept=kept,
            micro_batches=-(-self._job.global_batch // self._plans.micro_batch),
            morphs=morphs,
            lost={cause: round(samples / ideal, 5) for cause, samples in (lost or {}).items()} if ideal else {},
            plans={shape: round(share, 4) for shape, share in sorted(shares.items(), key=lambda s: -s[1])},
            training_share=training_s / duration_s,
            gpu_hours=gpu_hours,
            dollars=None if price is None else gpu_hours * price,
            stretches=stretches,
            checkpoints_s=checkpoints_s,
        )


class _History:
    """Turns the state machine's events into stretches of plans and counts of morphs."""

    def __init__(self, trace: Trace) -> None:
        self._spans = trace.spans()
        self._marks: list[tuple[float, GenerationRecord | None, str]] = []
        self._old: GenerationRecord | None = None
        self._recorded_s = 0.0
        self._steps = 0
        self.undone = 0
        """steps, by rollbacks"""
        self.kinds: dict[str, int] = {}

    def add_event(self, at_s: float, event: RunEvent) -> None:
        """Take one event of the state machine."""
        match event:
            case GenerationStarted(record=record):
                kind = _kind(record, self._old)
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                self._old = record
                self.undone += max(0, self._steps - record.first_step)
                self._steps = record.first_step
                # What came after the last committed step was lost, or spent on noticing and stopping.
                self._marks.append((self._recorded_s if self._marks else at_s, None, kind))
            case Morphed(record=record):
                self._train(at_s, record)
            case StepRecorded(step=step):
                self._recorded_s, self._steps = at_s, step + 1
                if self._old is not None and len(self._marks) == 1:
                    self._train(at_s, self._old)
            case _:
                pass

    def _train(self, at_s: float, record: GenerationRecord) -> None:
        """Note that a generation's first step is recorded: it began to train one step earlier."""
        kind = self._marks[-1][2]
        step_s = record.plan.step_s * (1 - record.kept_micro_batches / record.plan.micro_batches)
        self._marks.append((max(self._marks[-1][0], at_s - step_s), record, kind))

    def stretches(self, end_s: float) -> tuple[Stretch, ...]:
        """Stretches by time, without gaps after the first generation's start."""
        ends = [*(mark[0] for mark in self._marks), end_s][1:]
        return tuple(
            Stretch(begin_s=at_s, end_s=end, nodes=self._nodes(at_s), plan=record.plan if record else None, kind=kind)
            for (at_s, record, kind), end in zip(self._marks, ends, strict=True)
            if end > at_s
        )

    def _nodes(self, at_s: float) -> int:
        return next((nodes for begin_s, end_s, nodes in reversed(self._spans) if begin_s <= at_s), 0)


def _kind(record: GenerationRecord, old: GenerationRecord | None) -> str:
    """Return the reason why a generation began, in one word."""
    if old is None:
        return "start"
    if record.rollback:
        return "rollback"
    if record.plan == old.plan:
        return "same plan"
    if record.plan.workers > old.plan.workers:
        return "gain"
    return "loss" if record.steps_redone else "planned loss"
