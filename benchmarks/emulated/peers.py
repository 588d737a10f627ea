"""Peers' pipeline engines with slept compute, as they are installed: no file of theirs is changed.

    python -m benchmarks.emulated.peers ENGINE STAGES MICRO_BATCHES NETWORK UNIT_S STEPS

Runs in the environment that ``make bench-peers`` builds. One layer per stage; it sleeps one unit forward and two
backward, under activation checkpointing, which is these engines' usual setting and recomputes one unit.
"""

import importlib
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from benchmarks.emulated import wires
from benchmarks.emulated.network import NETWORKS, delay_sends, run_on_time
from benchmarks.emulated.work import work

MICRO_BATCH = 2
_c10d: Any = torch._C._distributed_c10d
_multiprocessing: Any = mp
Step = Callable[[], object]


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unit_s: float, micro_batch: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.unit_s, ctx.micro_batch = unit_s, micro_batch
        _sleep(1.0, unit_s, micro_batch, "F")
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors  # with checkpointing, reading them recomputes
        _sleep(2.0, ctx.unit_s, ctx.micro_batch, "B")
        [gradient] = gradients
        return gradient * weight, (gradient * x).sum().reshape(1), None, None


def _sleep(units: float, unit_s: float, micro_batch: int, kind: str) -> None:
    time.sleep(work().units(units, int(os.environ["RANK"]), micro_batch, kind) * unit_s)


_slept: Callable[..., torch.Tensor] = _Slept.apply


class Layer(torch.nn.Module):
    """Slept compute, recomputed in the backward unless the engine does that itself."""

    def __init__(self, unit_s: float, recompute: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.unit_s, self.recompute = unit_s, recompute

    def forward(self, x: torch.Tensor) -> Any:
        if not self.recompute:
            return self._run(x, _Counted.now)
        return checkpoint(self._run, x, _Counted.next(), use_reentrant=False)

    def _run(self, x: torch.Tensor, micro_batch: int) -> Any:
        return _slept(x, self.weight, self.unit_s, micro_batch)


class _Counted:
    """The number of the micro-batch that runs: every engine begins their forwards in order."""

    now, _begun = 0, 0

    @classmethod
    def next(cls) -> int:
        """The next forward begins."""
        cls.now = cls._begun % work().micro_batches
        cls._begun += 1
        return cls.now

    @classmethod
    def recomputed(cls, run: Callable[..., Any], *given: Any) -> Any:
        """Run a forward under checkpointing, and remember its number for when it runs again."""
        micro_batch = cls.next()

        def again(*inputs: Any) -> Any:
            cls.now = micro_batch
            return run(*inputs)

        return checkpoint(again, *given, use_reentrant=False)


def torch_engine(schedule: str, rank: int, stages: int, micro_batches: int, unit_s: float) -> Step:
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(Layer(unit_s), rank, stages, torch.device("cpu"))
    kind = getattr(pipelining, schedule)
    several = schedule == "ScheduleInterleaved1F1B"
    runner = kind([stage] if several else stage, micro_batches, loss_fn=lambda y, _target: y.mean())
    x = torch.randn(MICRO_BATCH * micro_batches, wires.width())
    given = [x] if rank == 0 else []
    target = {"target": x} if rank == stages - 1 else {}
    return lambda: runner.step(*given, **target)


def megatron(rank: int, stages: int, micro_batches: int, unit_s: float) -> Step:
    _without_cuda()
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    enums = importlib.import_module("megatron.core.enums")
    config_module = importlib.import_module("megatron.core.model_parallel_config")
    length, hidden = 4, wires.width() // 4  # as many elements as the others send
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, create_gloo_process_groups=False)
    config = config_module.ModelParallelConfig(
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32, deallocate_pipeline_outputs=False
    )
    config.hidden_size, config.fine_grained_activation_offloading, config.cuda_graph_impl = hidden, False, "none"
    model: Any = Layer(unit_s)
    received: list[torch.Tensor] = []

    def set_input_tensor(tensor: Any) -> None:
        received[:] = tensor if isinstance(tensor, list) else [tensor]

    model.config, model.model_type = config, enums.ModelType.encoder_or_decoder
    model.set_input_tensor = set_input_tensor

    def forward_step(_iterator: Any, module: Any, *_: Any) -> Any:
        x = received[0] if rank else torch.randn(length, MICRO_BATCH, hidden, requires_grad=True)
        return module(x), lambda y: (y.mean(), {"loss": y.mean().detach()})

    return lambda: schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step,
        data_iterator=iter([]),
        model=model,
        num_microbatches=micro_batches,
        seq_length=length,
        micro_batch_size=MICRO_BATCH,
    )


def _without_cuda() -> None:
    """Megatron-core asks CUDA for its device even where none is used: answer for the CPU."""
    zeros: Any = torch.zeros

    def on_cpu(*sizes: Any, **given: Any) -> Any:
        return zeros(*sizes, **{**given, **({"device": "cpu"} if given.get("device") == "cuda" else {})})

    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = (lambda: "cpu"), (lambda *_: None)
    torch_module: Any = torch
    torch_module.zeros = on_cpu


def deepspeed(rank: int, stages: int, micro_batches: int, unit_s: float) -> Step:
    module: Any = importlib.import_module("deepspeed")
    pipe: Any = importlib.import_module("deepspeed.pipe")
    module.init_distributed(dist_backend="gloo", verbose=False)
    net = pipe.PipelineModule(
        [pipe.LayerSpec(Layer, unit_s, False)] * stages,
        num_stages=stages,
        loss_fn=lambda y, _target: y.mean(),
        partition_method="uniform",
        activation_checkpoint_interval=1,
        activation_checkpoint_func=_Counted.recomputed,
    )
    engine, *_ = module.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        model_parameters=list(net.parameters()),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_print": 10**9,
        },
    )
    wide = MICRO_BATCH, wires.width()
    batch = (torch.randn(wide, requires_grad=True), torch.zeros(wide))
    data = iter(lambda: batch, None)
    return lambda: engine.train_batch(data_iter=data)


ENGINES: dict[str, Callable[[int, int, int, float], Step]] = {
    "torch-interleaved1f1b": lambda *given: torch_engine("ScheduleInterleaved1F1B", *given),
    "torch-gpipe": lambda *given: torch_engine("ScheduleGPipe", *given),
    "torch-1f1b": lambda *given: torch_engine("Schedule1F1B", *given),
    "megatron": megatron,
    "deepspeed": deepspeed,
}


def worker(
    rank: int, engine: str, stages: int, micro_batches: int, network: str, unit_s: float, steps: int, port: int
) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(stages),
        LOCAL_RANK=str(rank),
        DS_ACCELERATOR="cpu",
    )
    wires.enter(rank)
    if engine in ("megatron", "deepspeed"):  # imports take long
        importlib.import_module("megatron.core" if engine == "megatron" else "deepspeed")
    run_on_time()
    if engine != "deepspeed":
        dist.init_process_group("gloo", rank=rank, world_size=stages)
    step = ENGINES[engine](rank, stages, micro_batches, unit_s)
    delay_sends(_c10d.ProcessGroup, NETWORKS[network], unit_s, seed=rank)
    times = []
    for _ in range(steps):
        dist.barrier()
        begin_s = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - begin_s)
    if rank == 0:
        print("times", json.dumps(times), flush=True)
    os._exit(0)  # their groups and threads would take long to end


def main() -> None:
    engine, stages, micro_batches, network = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    port = random.randrange(20000, 30000)
    given = (engine, stages, micro_batches, network, float(sys.argv[5]), int(sys.argv[6]), port)
    # A fork saves an import for each rank, but DeepSpeed hangs in one.
    method = "spawn" if engine == "deepspeed" else "fork"
    _multiprocessing.start_processes(worker, given, nprocs=stages, start_method=method)


if __name__ == "__main__":
    main()
