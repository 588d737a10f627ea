"""``varuna checkpoints``: what a checkpoint directory holds, whether it is whole, and the model in it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.core.errors import CheckpointError, UsageError
from varuna.core.plain_text import plain
from varuna.process.console import warn

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from varuna.checkpoint.manifest import Manifest, StepFolder
    from varuna.store.base import Store

EXAMPLES = """Examples:

\b
varuna checkpoints list checkpoints/gpt2
varuna checkpoints verify s3://bucket/runs/gpt2
varuna checkpoints export checkpoints/gpt2 exported/
"""

app = typer.Typer(
    name="checkpoints",
    help="List and verify checkpoints, and export the model in them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Directory = Annotated[str, typer.Argument(metavar="DIR", help="Folder or URL: the Trainer's checkpoints=.")]
Step = Annotated[int | None, typer.Option("--step", min=0, help="Only the checkpoint of this step.")]


@app.command("list")
def list_(directory: Directory) -> None:
    """Show all checkpoints in DIR, newest first, without reading tensors."""
    from varuna.core.units import format_bytes

    store, folders = _open(directory, is_quick=True)
    table = _table("step", "plan", "generation", "files", "size", "next step", "state")
    problems: dict[int, str] = {}
    for folder in folders:
        manifest, state, problem = _look(store, folder)
        if problem:
            problems[folder.step] = problem
        shown = ("", "", str(len(folder.sizes)), format_bytes(sum(folder.sizes.values())))
        if manifest is not None:
            shown = (
                manifest.plan.shape,
                str(manifest.generation),
                str(len(manifest.shards)),
                format_bytes(manifest.size_bytes),
            )
        table.add_row(str(folder.step), *shown, _next_step(store, folder), _state(state))
    _show(table, problems)


@app.command()
def verify(directory: Directory, step: Step = None) -> None:
    """Read every byte of the checkpoints in DIR and compare checksums.

    Marks damaged checkpoints, so that no run uses them, and removes marks that
    are wrong. Damaged sums of gradients, which a run saves during a step, are
    removed. Exit code 1 if anything is damaged.
    """
    from varuna.core.units import format_bytes

    store, folders = _open(directory, step)
    table = _table("step", "read", "state")
    problems: dict[int, str] = {}
    for folder in folders:
        if not folder.is_committed:
            table.add_row(str(folder.step), "", "never finished")
            continue
        problem, size_bytes = _verify(store, folder)
        lost, sums_bytes = _verify_sums(store, folder)
        size_bytes += sums_bytes
        if problem or lost:
            problems[folder.step] = "\n  ".join([*([problem] if problem else []), *lost])
        table.add_row(str(folder.step), format_bytes(size_bytes), _state("damaged" if problem else "intact"))
    _show(table, problems)
    if problems:
        raise typer.Exit(1)


@app.command()
def export(
    directory: Directory,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    step: Step = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's config.json, if the run could not leave one.")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The averages of a run with ema=, in place of the values.")
    ] = False,
) -> None:
    """Write the model of the newest intact checkpoint in DIR as a Hugging Face folder.

    OUT receives safetensors files with an index, and config.json if the model
    has a configuration. from_pretrained and Trainer(weights=OUT) can read it.
    """
    from varuna.checkpoint.io.export import export_checkpoint
    from varuna.checkpoint.manifest import intact, newest_intact
    from varuna.core.units import format_bytes

    try:
        text = config.read_text() if config is not None else None
    except OSError as error:
        raise UsageError(f"cannot read --config {config}: {error.strerror}") from error
    store, folders = _open(directory, step)
    if step is not None:
        manifest = intact(store, folders[0])
    else:
        found = newest_intact(store)
        if found is None:
            raise CheckpointError(f"{store.url} has no complete checkpoint")
        manifest, warnings = found
        for warning in warnings:
            warn(warning)
    done = export_checkpoint(store, manifest, folder, config=text, average=ema)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print(f"step {manifest.step}: {done.tensors} tensors, {format_bytes(done.size_bytes)}, in {files} in {folder}")
    if not done.has_config:
        warn("no config.json: the model has no configuration. Give --config FILE.")


def _open(directory: str, step: int | None = None, *, is_quick: bool = False) -> "tuple[Store, list[StepFolder]]":
    """The store, and its folders, newest first; ``is_quick``: somebody waits for it.

    Raises:
        CheckpointError: there are none, or not the one that was asked for.
    """
    from varuna.checkpoint.manifest import survey
    from varuna.store.opening import open_store
    from varuna.store.retry import SHOWN_S, impatient

    store = open_store(directory)
    if is_quick:
        store = impatient(store, SHOWN_S, SHOWN_S)
    folders = survey(store)
    if not folders:
        raise CheckpointError(f"{store.url} has no checkpoints. Name the folder or URL of the Trainer's checkpoints=.")
    if step is None:
        return store, folders
    found = [folder for folder in folders if folder.step == step]
    if not found:
        steps = ", ".join(str(folder.step) for folder in folders[:10])
        raise CheckpointError(f"{store.url} has no checkpoint of step {step}. It has those of {steps}.")
    return store, found


def _look(store: "Store", folder: "StepFolder") -> "tuple[Manifest | None, str, str]":
    """The manifest if it can be read, the checkpoint's state in a word, and what is wrong with it."""
    from varuna.checkpoint.manifest import intact, read_manifest
    from varuna.core.errors import StoreUnavailable

    if not folder.is_committed:
        return None, "never finished", ""
    manifest = None
    try:
        manifest = read_manifest(store, folder.step)
        intact(store, folder)
    except StoreUnavailable:
        raise
    except CheckpointError as error:
        return manifest, "damaged", str(error)
    return manifest, "complete", ""


def _verify(store: "Store", folder: "StepFolder") -> tuple[str | None, int]:
    """Verify a checkpoint; return its fault (None without one), and the bytes that were read until then."""
    from varuna.checkpoint.io import restore
    from varuna.checkpoint.manifest import check_present, mark_damaged, read_manifest
    from varuna.checkpoint.names import DAMAGED, step_folder
    from varuna.core.errors import DamagedCheckpoint

    size_bytes = 0
    try:
        manifest = read_manifest(store, folder.step)
        check_present(store, folder, manifest.shards)
        for shard in restore.verify(store, manifest):
            size_bytes += shard.size_bytes
    except DamagedCheckpoint as error:
        mark_damaged(store, folder.step, str(error))
        return str(error), size_bytes
    if folder.is_damaged:
        store.remove(f"{step_folder(folder.step)}/{DAMAGED}")
    return None, size_bytes


def _next_step(store: "Store", folder: "StepFolder") -> str:
    """Say how many micro-batches of the step after a checkpoint need not run again; empty: none was saved."""
    from varuna.checkpoint.saved_sums import labels_in, whole_micro_batches

    labels = [label for label in labels_in(store, folder).values() if label is not None]
    done, of = whole_micro_batches(labels)
    return f"{done:,} of {of:,}" if labels else ""


def _verify_sums(store: "Store", folder: "StepFolder") -> tuple[list[str], int]:
    """Damaged sums of gradients, which are gone now, and the bytes that were read."""
    from varuna.checkpoint.io.sums import read_sums
    from varuna.checkpoint.names import parse_sums_file
    from varuna.core.errors import DamagedCheckpoint

    lost, read_bytes = [], 0
    for file, size_bytes in sorted(folder.sizes.items()):
        if parse_sums_file(file) is None:
            continue
        try:
            read_sums(store, folder.step, file)
            read_bytes += size_bytes
        except DamagedCheckpoint as error:
            lost.append(f"removed, and its micro-batches run again: {error}")
    return lost, read_bytes


def _state(state: str) -> "Text":
    from rich.text import Text

    return Text(state, style="red" if state == "damaged" else "")


def _show(table: "Table", problems: dict[int, str]) -> None:
    """Print the table, and below it the problems in full."""
    from varuna.process.plain_console import PlainConsole

    PlainConsole().print(table)
    for step, problem in problems.items():
        print(plain(f"  step {step}: {problem}"))


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        is_text = column in ("state", "plan")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table
