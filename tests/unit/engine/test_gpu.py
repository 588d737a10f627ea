"""Facts that only a GPU can show: ``pytest -m gpu``. Ranks share one GPU and talk through staged links; the last tests
want two GPUs, and NCCL between them.

Kernels that add in no fixed order (attention's backward, for one) make runs differ in their last bits, so losses are
compared within a tolerance here; on the CPU the same comparisons are exact.
"""

import json
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import varuna
import varuna.testing
from tests.unit.engine.device.test_staging import away
from tests.unit.engine.models import Tokens, adamw, dropping, tiny_gpt2, tiny_llama
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.test_batch_norm import setup as normalised
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.io.snapshot import SnapshotBuffer, parts_of
from varuna.core.devices import equal_workers, worker_bytes
from varuna.engine.base.transport import local_store
from varuna.engine.device.host_copies import DONE, Ready, StreamCopies
from varuna.engine.device.streams import CudaStreams, streams_of
from varuna.engine.links.gpu_links import GpuChannel
from varuna.engine.links.message import Layout
from varuna.engine.links.nccl import Nccl
from varuna.engine.links.traffic import traffic_of
from varuna.job.spec import JobSpec
from varuna.job.start import open_session
from varuna.measure.network import Peers
from varuna.membership.detect import solo_from_environment
from varuna.partition.cut.split import Crossing
from varuna.testing.threads import run_all
from varuna.timing.window import Window

DEVICE = "cuda:0"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
CLOSE = 1e-4


def fused(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3, fused=True)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_one_gpu_follows_the_eager_loop(build: Any) -> None:
    setup = Setup(build=build, device=DEVICE)
    assert worst(setup.losses(1, 1), reference(setup)) < CLOSE


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_pipelines_and_replicas_on_one_gpu_equal_one_process(stages: int, replicas: int) -> None:
    """With dropout: F and R must draw the same, in any plan."""
    setup = Setup(build=dropping, dataset=Tokens(padded=True), global_batch=12, device=DEVICE)
    alone = setup.losses(1, 1)
    assert worst(setup.losses(stages, replicas), alone) < CLOSE


@pytest.mark.parametrize("offload", [False, True])
def test_half_precision_and_state_in_host_memory(offload: bool) -> None:
    setup = Setup(build=tiny_gpt2, precision="bf16", device=DEVICE, offload=offload, optimizer=fused)
    alone = Setup(build=tiny_gpt2, precision="bf16", device=DEVICE).losses(1, 1)
    assert worst(setup.losses(2, 1), alone) < 2e-2


def test_fused_adamw_is_adamw() -> None:
    plain, other = (Setup(build=tiny_gpt2, device=DEVICE, optimizer=each) for each in (adamw, fused))
    assert worst(other.losses(2, 1), plain.losses(2, 1)) < CLOSE


def test_running_statistics_come_over_all_replicas() -> None:
    on_cpu, on_gpu = normalised(), normalised(device=DEVICE)
    assert worst(on_gpu.losses(2, 2), on_cpu.losses(2, 2)) < 1e-3


def test_a_checkpoint_of_a_gpu_resumes(tmp_path: Path) -> None:
    def losses(steps: int, folder: Path) -> list[float]:
        trainer = varuna.Trainer(
            tiny_gpt2, Tokens(), fused, global_batch=8, micro_batch=2, device=DEVICE, checkpoints=folder
        )
        return [step.loss for step in trainer.steps(steps)]

    whole = losses(4, tmp_path / "whole")
    parts = losses(2, tmp_path / "parts") + losses(4, tmp_path / "parts")
    assert parts == pytest.approx(whole, rel=CLOSE)


def test_a_message_crosses_bit_for_bit_while_the_device_computes() -> None:
    copies = traffic_of(torch.device(DEVICE)).links
    assert isinstance(copies, StreamCopies)
    crossing = Crossing("x", torch.float32, (0, 1 << 16), (1, 0), differentiable=True)
    layout, busy = Layout((crossing,), 8, digests=True), torch.randn(4096, 4096, device=DEVICE)
    for round_number in range(20):
        for _ in range(5):
            busy = busy @ busy * 1e-4
        value = torch.full((8, 1 << 16), float(round_number), device=DEVICE)
        message = layout.pack({"x": value}, range(8), copies)
        del value
        torch.full((8, 1 << 16), -1.0, device=DEVICE)  # would take the memory of a value that nobody keeps
        found = layout.unpack(message.whole(), copies)["x"]
        assert message.buffer.is_pinned()
        assert found.eq(float(round_number)).all()
        assert layout.digests_of(message.buffer) == list(range(8))


def test_stashed_inputs_and_offloaded_state_pass_the_device_together() -> None:
    setup = Setup(build=dropping, micro_batch=1, device=DEVICE)
    other = Setup(build=dropping, micro_batch=1, device=DEVICE, adjusted=away, offload=True)
    assert worst(other.losses(3, 1), setup.losses(3, 1)) < CLOSE


def test_state_goes_there_and_back_bit_for_bit_while_the_device_computes() -> None:
    copies = traffic_of(torch.device(DEVICE)).optimizer
    assert isinstance(copies, StreamCopies)
    [home] = copies.at_rest([torch.zeros(1 << 20)])
    assert home.is_pinned()
    busy = torch.randn(4096, 4096, device=DEVICE)
    left: Ready = DONE
    for round_number in range(1, 21):
        [value], arrived = copies.fetch([home], left)
        for _ in range(5):
            busy = busy @ busy * 1e-4
        copies.compute_after(arrived)
        value += 1
        left = copies.copy_to_host([(value, home)])
        del value
        torch.full((1 << 20,), -1.0, device=DEVICE)  # would take memory that nobody keeps
        if round_number % 5 == 0:
            left.wait()
            assert home.eq(float(round_number)).all()


def test_a_snapshot_is_of_its_moment_though_the_next_update_is_queued_behind_it() -> None:
    copies = traffic_of(torch.device(DEVICE)).saves
    values = {f"parameters/{number}": torch.zeros(1 << 22, device=DEVICE) for number in range(8)}
    count = torch.zeros(())  # as AdamW's step: in host memory
    states = {0: SectionState(0, {**values, "optimizer/step": count}, {})}
    planned = parts_of(list(states.values()), replica=0, holders={0: (0,)}, generation=0)
    buffer = SnapshotBuffer()
    for round_number in range(10):
        parts, pairs = buffer.place(planned, states, copies.arena)
        copied = copies.copy_to_host(pairs)
        for value in values.values():
            value * 2.0  # a forward, which need not wait
        copies.compute_after(copied)
        for value in (*values.values(), count):
            value += 1
        copied.wait()
        for part, data in parts:
            for piece in part.pieces:
                run = torch.frombuffer(
                    bytearray(data[piece.offset : piece.offset + piece.size_bytes]), dtype=torch.float32
                )
                assert run.eq(float(round_number)).all()


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_of_every_step_are_whole(offload: bool, tmp_path: Path) -> None:
    """Resuming from any checkpoint, each saved while the next step runs, gives the same losses."""

    def losses(steps: int, folder: Path, every: int) -> list[float]:
        trainer = varuna.Trainer(
            tiny_gpt2,
            Tokens(),
            fused,
            global_batch=8,
            micro_batch=2,
            device=DEVICE,
            checkpoints=varuna.Checkpoints(folder, every=every),
            memory=varuna.Memory(offload_optimizer=offload),
        )
        return [step.loss for step in trainer.steps(steps)]

    whole = losses(6, tmp_path / "whole", 100)
    parts = losses(3, tmp_path / "parts", 1) + losses(6, tmp_path / "parts", 1)
    assert parts == pytest.approx(whole, rel=CLOSE)


def test_messages_and_sums_are_calibrated_from_one_device_memory_to_the_other() -> None:
    store, sizes, found = local_store(), (64, 1 << 20), dict[int, tuple[Any, Any]]()

    def measure(rank: int) -> None:
        peers, traffic = Peers(store, rank, 2, "127.0.0.1"), traffic_of(torch.device(DEVICE))
        found[rank] = peers.messages(sizes, traffic), peers.rings(sizes, traffic.sums)

    run_all([partial(measure, rank) for rank in range(2)], bound_s=120)
    for messages, [ring] in found.values():
        assert {size for size, _ in messages} == set(sizes)
        assert all(seconds > 0 for _, seconds in ring.samples)


def test_sections_are_timed_by_events() -> None:
    setup = Setup(build=tiny_gpt2, device=DEVICE)
    window = Window(setup.job(), 0, len(setup.model.sections), setup.beginning)
    batch: dict[str, Tensor] = setup.source.micro_batch(range(2)).tensors
    window.round(batch, 2)
    found = window.round(batch, 2)
    assert min(found.forward_s.values()) > 0
    assert min(found.backward_s.values()) > 0
    assert window.update() > 0
    assert window.snapshot() > 0


def test_plans_are_made_for_what_the_gpu_has() -> None:
    streams = streams_of(torch.device(DEVICE))
    assert streams is not None
    found = streams.memory()
    assert found is not None
    assert found == streams.memory()
    assert found.memory_bytes == torch.cuda.get_device_properties(DEVICE).total_memory
    spec, solo = (
        JobSpec(tiny_gpt2, Tokens(), adamw, 8, micro_batch=2, device=torch.device(DEVICE)),
        solo_from_environment(),
    )
    session = open_session(spec, 1, solo)
    assert len(list(session.steps())) == 1
    session.close()
    workers = solo._workers(solo._job)  # type: ignore[arg-type]  # it has joined
    assert workers == equal_workers(1, worker_bytes([found]))


def test_stages_keep_to_the_promised_memory() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "memory_promised.py"
    command = [sys.executable, str(script), "--model", "gpt2", "--case", "2x1 few", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["worst_error"] < 0.3


@pytest.mark.parametrize("shapes", [{4: 2, 3: 3}, {3: 3, 2: 2}])
def test_sums_and_copies_outlive_a_worker(shapes: dict[int, int]) -> None:
    """Workers are threads that share the GPU; the second plan has the copies of a lost stage."""

    def script() -> list[int]:
        trainer = varuna.Trainer(
            tiny_gpt2, Tokens(padded=True), fused, global_batch=36, micro_batch=1, device=DEVICE, clip_grad_norm=1.0
        )
        return [step.index for step in trainer.steps(4)]

    alone = varuna.testing.run(script).losses
    workers = max(shapes)
    lost = varuna.testing.run(
        script, workers=workers, stages=shapes, faults=[varuna.testing.fail_at(rank=1, step=2, phase="B", after=6)]
    )
    assert lost.losses == pytest.approx(alone, rel=CLOSE)
    assert len(lost.plans) == 2


def test_a_communicator_of_one_gpu_sums_on_a_given_stream_until_it_is_aborted() -> None:
    device = torch.device(DEVICE)
    fabric, streams = Nccl(device), CudaStreams(device)
    fabric.bind("127.0.0.1")
    communicator = fabric.connect(fabric.new_identity(), 0, 1)
    channel = GpuChannel(communicator, 0, streams, lambda: False)
    channel.connected()
    values = torch.arange(1000.0, device=device)
    torch.cuda.synchronize()
    channel.all_reduce(values)
    assert values.tolist() == list(range(1000))
    communicator.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        channel.all_reduce(values)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_bytes_go_from_gpu_to_gpu_and_an_abort_frees_a_stream_whose_peer_is_frozen() -> None:
    devices = [torch.device("cuda", rank) for rank in range(2)]
    fabrics = [Nccl(device) for device in devices]
    identity = fabrics[0].new_identity()
    sent = torch.arange(100_000, dtype=torch.int64).view(torch.uint8)
    gates = threading.Barrier(2)

    def work(rank: int) -> None:
        streams = CudaStreams(devices[rank])
        communicator = fabrics[rank].connect(identity, rank, 2)
        channel = GpuChannel(communicator, 1 - rank, streams, lambda: False)
        channel.connected()
        for _ in range(5):
            body = channel.room(sent.nbytes)
            if rank == 0:
                body.copy_(sent)
                torch.cuda.synchronize()
                channel.send(body)
            else:
                channel.receive(body)
                assert torch.equal(body.cpu(), sent)
        if rank:  # the other one never sends
            with pytest.raises(RuntimeError, match="waited 0 s"):
                channel.receive(body, bound_s=0.2)
            communicator.abort()
            torch.cuda.synchronize()
        gates.wait(60)
        communicator.abort()

    run_all([partial(work, rank) for rank in range(2)])


@two_gpus
@pytest.mark.parametrize(("stages", "misbehave"), [(2, ""), (1, ""), (2, "F:end:3:0,B:end:9:1")])
def test_workers_with_gpus_of_their_own_follow_one_process(stages: int, misbehave: str, tmp_path: Path) -> None:
    """With NCCL, and through kills."""
    job = [str(Path(__file__).parents[2] / "scenarios" / "job.py"), "--steps", "20", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "varuna.cli.main", "run", "--workers", "2", "--stages", str(stages)]
    alone = losses_of([sys.executable, *job])
    found = losses_of([*command, *job, "--links", "nccl", "--slow", "0.1", "--misbehave", misbehave])
    assert found.keys() == alone.keys()
    assert all(found[step] == pytest.approx(alone[step], rel=CLOSE) for step in alone)


def losses_of(command: list[str]) -> dict[int, float]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", done.stdout, re.MULTILINE)}
