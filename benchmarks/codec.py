"""Activations, gradients and state of a GPT-2, compressed: by several codecs on one core, and over narrow lines.

    pip install zstandard lz4 blosc2 isal zlib-ng         # whichever are there take part
    python -m benchmarks.codec [--steps 40]
    python -m benchmarks.codec --line 100 [--rounds 5] [--seconds 4]

The model learns Python's standard library for some steps, in fp32; then one step in bf16 and one in fp32 give the
tensors. Without ``--line``: ratio, and MB/s of the tensor for both ways, each the best of some tries in processor time;
of the bytes as they are, of all sorted by their place within a number, and of those with the exponent only.

With ``--line``: bytes per second between two hosts, which are network namespaces whose lines `tc` makes narrow (0: as
wide as they are), with compression and without it, by turns, over the engine's own connections; medians. It needs root,
ip, tc, unshare and nsenter. The last line is JSON.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "gpt2_text"))

from model import build_model  # noqa: E402
from text import TextDataset  # noqa: E402

from benchmarks.emulated.hosts import Hosts  # noqa: E402
from tests.scenarios.network import why_not  # noqa: E402
from varuna.engine.base.codec import HEADER_BYTES, Codec, Form, read_header  # noqa: E402
from varuna.engine.base.connection import bytes_of  # noqa: E402
from varuna.engine.base.endpoint import Endpoint  # noqa: E402
from varuna.engine.base.transport import Group, Work, connect_store  # noqa: E402
from varuna.schedule.buffers import ACTIVATIONS_COMING  # noqa: E402

PART_BYTES = 2**18
TRIES = 5
BATCH = 8
LIMIT_S = 600.0


def tensors(steps: int) -> dict[str, Tensor]:
    """Return the tensors that a training sends after ``steps`` steps."""
    torch.manual_seed(0)
    args = argparse.Namespace(layers=4, width=192, heads=4, length=128, dropout=0.0)
    model = build_model(args).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    samples = TextDataset(args.length)
    found: dict[str, Tensor] = {}

    def step(model: Any, name: str) -> None:
        tokens = torch.stack([samples[int(n)]["input_ids"] for n in torch.randint(0, len(samples), (BATCH,))])

        def keep(number: int) -> Callable[[Any, Any, Any], None]:
            def hook(_: Any, given: Any, came: Any) -> None:
                hidden = came[0] if isinstance(came, tuple) else came
                found[f"{name} activation {number}"] = hidden.detach().clone()
                hidden.register_hook(lambda each: found.__setitem__(f"{name} gradient {number}", each.clone()))

            return hook

        hooks = [block.register_forward_hook(keep(n)) for n, block in enumerate(model.transformer.h) if name]
        model(input_ids=tokens, labels=tokens).loss.backward()
        for hook in hooks:
            hook.remove()

    for _ in range(steps):
        optimizer.zero_grad()
        step(model, "")
        optimizer.step()
    step(copy.deepcopy(model).bfloat16(), "bf16")
    optimizer.zero_grad()
    step(model, "fp32")
    parameters = list(model.parameters())
    grads = [each.grad for each in parameters if each.grad is not None]
    found["fp32 sums of gradients"] = torch.cat([each.flatten() for each in grads])
    found["fp32 parameters"] = torch.cat([each.detach().flatten() for each in parameters])
    for moment in ("exp_avg", "exp_avg_sq"):
        found[f"fp32 {moment}"] = torch.cat([optimizer.state[each][moment].flatten() for each in parameters])
    return {name: each.flatten() for name, each in found.items()}


# -- codecs on one core ------------------------------------------------------------------------------------


class Compressor(NamedTuple):
    """One of a library's."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


def compressors() -> dict[str, Compressor]:
    """Those that are there."""

    def huffman(module: Any) -> Compressor:
        def compress(given: bytes) -> bytes:
            coder = module.compressobj(1, module.DEFLATED, -15, 9, module.Z_HUFFMAN_ONLY)
            packed: bytes = coder.compress(given) + coder.flush()
            return packed

        return Compressor(compress, lambda packed: module.decompress(packed, -15))

    def levels(name: str, module: Any, *which: int) -> dict[str, Compressor]:
        return {
            f"{name} {level}": Compressor(lambda given, level=level: module.compress(given, level), module.decompress)  # type: ignore[misc]
            for level in which
        }

    makers: dict[str, Callable[[Any], dict[str, Compressor]]] = {
        "zlib": lambda module: {**levels("zlib", module, 1), "zlib huffman": huffman(module)},
        "zlib_ng.zlib_ng": lambda module: {**levels("zlib-ng", module, 1), "zlib-ng huffman": huffman(module)},
        "isal.isal_zlib": lambda module: levels("isal", module, 0, 1),
        "zstandard": lambda module: levels("zstd", module, -5, 1, 3),
        "lz4.block": lambda module: {"lz4": Compressor(module.compress, module.decompress)},
        "blosc2": lambda module: {
            f"blosc2 {codec.name.lower()}": Compressor(
                lambda given, codec=codec: module.compress(  # type: ignore[misc]
                    given, typesize=1, clevel=1, filter=module.Filter.NOFILTER, codec=codec
                ),
                module.decompress,
            )
            for codec in (module.Codec.LZ4, module.Codec.ZSTD)
        },
    }
    found: dict[str, Compressor] = {}
    for name, make in makers.items():
        try:
            found |= make(import_module(name))
        except ImportError:
            print(f"{name} is not here", file=sys.stderr)
    return found


def fastest(run: Callable[[Any], Any], given: Any) -> tuple[float, Any]:
    """The least seconds of some tries, and what comes out."""
    taken_s, came = [], None
    for _ in range(TRIES):
        begin_s = time.thread_time()
        came = run(given)
        taken_s.append(time.thread_time() - begin_s)
    return min(taken_s), came


def row(values: Tensor, compressor: Compressor, which: str) -> tuple[float, float, float]:
    """Ratio, and MB/s both ways."""
    size, wide = values.nbytes // PART_BYTES * PART_BYTES or values.nbytes, values.itemsize
    sent, forth_s, back_s = 0, 0.0, 0.0
    for first in range(0, size, PART_BYTES):
        part = values.view(torch.uint8)[first : min(first + PART_BYTES, size)]
        sorted_ = part.view(-1, wide).t().contiguous().view(-1)
        coded = {"whole": part, "planes": sorted_, "exponents": sorted_[-(part.numel() // wide) :]}[which]
        given = coded.numpy().tobytes()
        taken_s, packed = fastest(compressor.compress, given)
        undone_s, came = fastest(compressor.decompress, packed)
        assert came == given
        sent, forth_s, back_s = sent + len(packed) + part.numel() - len(given), forth_s + taken_s, back_s + undone_s
    return size / sent, size / forth_s / 1e6, size / back_s / 1e6


def ours(values: Tensor) -> tuple[float, float, float]:
    """The engine's codec, sorting and checksums included."""
    codec, form, sent, forth_s, back_s = Codec(), Form(values.itemsize, 1), 0, 0.0, 0.0
    view = bytes_of(values)
    for first in range(0, len(view), PART_BYTES):
        part = view[first : first + PART_BYTES]
        taken_s, pieces = fastest(lambda part: codec.encode(part, form), part)
        packed, into = b"".join(pieces), memoryview(bytearray(len(part)))
        header = read_header(packed[:HEADER_BYTES], len(part))
        body = memoryview(packed)[HEADER_BYTES:]
        undone_s, _ = fastest(lambda into, header=header, body=body: codec.decode(header, body, into), into)  # type: ignore[misc]
        assert into == part
        sent, forth_s, back_s = sent + len(packed), forth_s + taken_s, back_s + undone_s
    return len(view) / sent, len(view) / forth_s / 1e6, len(view) / back_s / 1e6


def compared(found: dict[str, Tensor]) -> None:
    """Print a table for each tensor."""
    torch.set_num_threads(1)
    for name in ("bf16 activation 1", "bf16 gradient 1", *(each for each in found if each.startswith("fp32 "))):
        values = found[name][: 2**20]
        print(f"\n{name}, {values.nbytes:,} bytes\n| codec | of | ratio | MB/s | MB/s back |\n|---|---|---|---|---|")
        rows = {("the engine's", "exponents"): ours(values)}
        for codec, compressor in compressors().items():
            for which in ("whole", "planes", "exponents"):
                rows[codec, which] = row(values, compressor, which)
        for (codec, which), (ratio, forth, back) in rows.items():
            print(f"| {codec} | {which} | {ratio:.3f} | {forth:.0f} | {back:.0f} |", flush=True)


# -- over a line -------------------------------------------------------------------------------------------


def end_of_line(rank: int, file: str, line: float, rounds: int, seconds: float) -> None:
    """Send, or receive and time."""
    torch.set_num_threads(1)
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosts=rank == 0)
    host = os.environ["VARUNA_INTERFACE"]
    groups = {on: Group(store, f"line{on}", rank, 2, Endpoint(host), compresses=on) for on in (False, True)}
    kinds = torch.load(file)
    rates: dict[str, dict[bool, list[float]]] = {kind: {False: [], True: []} for kind in kinds}
    for kind, messages in kinds.items():
        tag = 100 + list(kinds).index(kind)
        size = messages[0].nbytes
        many = max(24, int(seconds * (line or 4000) * 1e6 / 8 / size))
        for turn in range(rounds + 1):
            for on in (turn % 2 == 0, turn % 2 == 1):
                groups[False].all_reduce(torch.zeros(1))
                taken_s = _turn(groups[on], rank, tag, messages, many)
                if turn and rank:  # the first one finds out
                    rates[kind][on].append(many * size / taken_s)
    groups[False].all_reduce(torch.zeros(1))
    saved = groups[True].compressed
    if rank == 0:
        print(f"sent {saved.sent_bytes:,} bytes for {saved.size_bytes:,}", file=sys.stderr, flush=True)
    if rank == 1:
        found = {
            kind: {
                "MB/s without": round(median(each[False]) / 1e6, 2),
                "MB/s": round(median(each[True]) / 1e6, 2),
                "ratio": round(
                    median(with_ / without for with_, without in zip(each[True], each[False], strict=True)), 3
                ),
            }
            for kind, each in rates.items()
        }
        print(json.dumps({"Mb/s": line, **found}), flush=True)
    os._exit(0)


def _turn(group: Group, rank: int, tag: int, messages: list[Tensor], many: int) -> float:
    """Move ``many`` messages, of which some are asked for ahead; seconds."""
    begin_s = time.monotonic()
    if rank == 0:
        for work in [group.send(messages[n % len(messages)], 1, tag) for n in range(many)]:
            work.wait(LIMIT_S)
        return 0.0
    coming: deque[tuple[int, Work]] = deque()
    for number in range(many + ACTIVATIONS_COMING):
        if number < many:
            coming.append((number, group.receive(torch.empty_like(messages[0]), 0, tag)))
        if number >= ACTIVATIONS_COMING:
            at, work = coming.popleft()
            assert torch.equal(work.wait(LIMIT_S).view(torch.uint8), messages[at % len(messages)].view(torch.uint8))
    return time.monotonic() - begin_s


def over_a_line(found: dict[str, Tensor], line: float) -> None:
    """Start both ends."""
    if reason := why_not("tc"):
        raise SystemExit(reason)
    kinds = {kind: [found[each] for each in found if each.startswith(kind)] for kind in
             ("bf16 activation", "bf16 gradient", "fp32 activation")}  # fmt: skip
    kinds["fp32 sums of gradients"] = list(found["fp32 sums of gradients"][: 2**20].chunk(2))
    with tempfile.TemporaryDirectory() as folder, closing(Hosts(2, 1, line * 1e6 or inf)) as hosts:
        file = Path(folder) / "messages.pt"
        torch.save({kind: [each.clone() for each in values] for kind, values in kinds.items()}, file)
        hosts.run("benchmarks.codec", [*sys.argv[1:], "--file", str(file)], 2, LIMIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="of the model before")
    parser.add_argument("--line", type=float, metavar="MBIT", help="of both hosts, in each direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn without compression, about")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where tensors are kept for the next time")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        end_of_line(options.rank, options.file, options.line, options.rounds, options.seconds)
    if options.keep is not None and options.keep.exists():
        found = torch.load(options.keep)
    else:
        found = tensors(options.steps)
        if options.keep is not None:
            torch.save(found, options.keep)
    if options.line is None:
        compared(found)
    else:
        over_a_line(found, options.line)


if __name__ == "__main__":
    main()
