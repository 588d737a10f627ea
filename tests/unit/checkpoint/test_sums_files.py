"""Files of sums of gradients beside a checkpoint: what they say, what is believed, and when they go."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.checkpoint.saves import SECTIONS, assemble, make_job, make_plan, save, save_parts
from varuna.checkpoint.io.sums import fingerprint, read_sums, write_sums
from varuna.checkpoint.manifest import commit, find_step, mark_damaged
from varuna.checkpoint.names import parse_sums_file, step_folder, sums_file
from varuna.checkpoint.retention import Kept, retain
from varuna.checkpoint.saved_sums import SumsLabel, find_sums, job_of, labels_in, whole_micro_batches
from varuna.core.errors import DamagedCheckpoint
from varuna.core.sums import IndexSet, MicroBatchLoss, SectionSum
from varuna.store.base import Store
from varuna.store.opening import open_store

JOB = make_job()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    return open_store(f"memory://{request.node.nodeid}")


def write(
    store: Store, step: int, section: int = 0, spans: IndexSet = ((0, 3),), *, job: str = "", number: int = 0
) -> str:
    """A file of four numbers; with the losses of its micro-batches, as of the last stage."""
    file = sums_file(section, 1, "0123456789abcdef", number)
    losses = tuple(
        MicroBatchLoss(micro_batch=j, values=(float(j), 1.0)) for first, end in spans for j in range(first, end)
    )
    label = SumsLabel(
        job=job or job_of(JOB),
        parameters=7,
        sections=2,
        micro_batch=2,
        micro_batches=4,
        sums=SectionSum(section=section, micro_batches=spans),
        losses=losses,
    )
    write_sums(store, step, file, label, {"sums": torch.arange(4.0), "statistics": torch.ones(3, dtype=torch.uint8)})
    return file


def sums_in(store: Store, step: int) -> list[str]:
    return [file for file in find_step(store, step).sizes if parse_sums_file(file) is not None]


def test_what_is_written_is_read_bit_for_bit(store: Store) -> None:
    label, tensors = read_sums(store, 4, write(store, 4, 2, ((0, 1), (2, 4))))
    assert label.sums == SectionSum(section=2, micro_batches=((0, 1), (2, 4)))
    assert torch.equal(tensors["sums"], torch.arange(4.0))
    assert tensors["statistics"].tolist() == [1, 1, 1]


def test_sums_of_this_job_are_found_with_all_losses(store: Store) -> None:
    files = {write(store, 4, 0, ((0, 2),)), write(store, 4, 0, ((2, 3),), number=1), write(store, 4, 1, ((0, 1),))}
    write(store, 4, 2, job="another")
    found = find_sums(store, find_step(store, 4), JOB)
    assert found is not None
    assert {each.file for each in found.sums} == files
    assert [loss.micro_batch for loss in found.losses] == [0, 1, 2]
    assert find_sums(store, find_step(store, 5), JOB) is None


def test_a_file_that_is_replaced_while_others_are_listed_is_found_by_its_new_name(store: Store) -> None:
    """As by a worker of the generation before, whose last save ends now."""
    old, folder = write(store, 4), find_step(store, 4)
    new = write(store, 4, number=1)
    store.remove(f"{step_folder(4)}/{old}")
    found = find_sums(store, folder, JOB)
    assert found is not None
    assert [each.file for each in found.sums] == [new]


def test_a_micro_batch_counts_if_all_sections_have_it_and_its_loss_is_known(store: Store) -> None:
    for section, spans in ((0, ((0, 2),)), (0, ((3, 4),)), (1, ((1, 4),))):
        write(store, 4, section, spans, number=spans[0][0])
    labels = [label for label in labels_in(store, find_step(store, 4)).values() if label is not None]
    assert whole_micro_batches(labels) == (2, 4)


@given(st.binary(max_size=200))
def test_a_file_of_anything_is_no_sum(data: bytes) -> None:
    store = open_store("memory://a-file-of-anything")
    file = sums_file(0, 1, "0123456789abcdef", 0)
    for content in (data, len(data).to_bytes(8, "little") + data):
        store.put(f"{step_folder(4)}/{file}", content)
        assert labels_in(store, find_step(store, 4)) == {file: None}
        with pytest.raises(DamagedCheckpoint):
            read_sums(store, 4, file)
        assert not sums_in(store, 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0, 16]", "[0, 12]"),
        ("[4]", "[-4]"),
        ("F32", "F99"),
        ("[4]", "[" * 10**5),
        ("[[0,3]]", "[[0,9]]"),
        ("[[0,3]]", "[[3,0]]"),
        ('micro_batch\\":2', 'micro_batch\\":{}'),
    ],
)
def test_a_header_that_contradicts_itself_is_not_believed(store: Store, old: str, new: str) -> None:
    file = write(store, 4)
    name = f"{step_folder(4)}/{file}"
    data = store.get(name)
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].decode()
    assert old in text
    changed = text.replace(old, new, 1).encode()
    store.put(name, len(changed).to_bytes(8, "little") + changed + data[end:])
    assert labels_in(store, find_step(store, 4)) == {file: None}
    with pytest.raises(DamagedCheckpoint):
        read_sums(store, 4, file)


@pytest.mark.parametrize("elements", [10**15, 10**30])
def test_no_memory_is_taken_for_what_a_file_does_not_have(store: Store, elements: int) -> None:
    name = f"{step_folder(4)}/{(file := write(store, 4))}"
    data = store.get(name)
    end = 8 + int.from_bytes(data[:8], "little")
    text = data[8:end].replace(b"[0, 16]", b"[0, %d]" % (4 * elements)).replace(b"[4]", b"[%d]" % elements)
    store.put(name, len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(DamagedCheckpoint):
        read_sums(store, 4, file)


def test_a_wrong_byte_is_found_and_the_file_removed(store: Store) -> None:
    file = write(store, 4)
    data = bytearray(store.get(f"{step_folder(4)}/{file}"))
    data[-1] ^= 1
    store.put(f"{step_folder(4)}/{file}", bytes(data))
    with pytest.raises(DamagedCheckpoint, match="checksum"):
        read_sums(store, 4, file)
    assert not sums_in(store, 4)


def test_any_wrong_byte_of_what_is_read_is_found(store: Store) -> None:
    """In the label, too: a micro-batch that it leaves out would be added twice, and no vote would show it."""
    file = write(store, 4)
    name = f"{step_folder(4)}/{file}"
    data = store.get(name)
    believed = read_sums(store, 4, file)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        store.put(name, bytes(changed))
        try:
            label, tensors = read_sums(store, 4, file)
        except DamagedCheckpoint:
            continue
        assert label == believed.label  # such as the step's number, which nobody reads here
        assert torch.equal(tensors["sums"], believed.tensors["sums"])


def test_until_all_sections_have_sums_no_micro_batch_counts(store: Store) -> None:
    write(store, 4, 0)
    labels = [label for label in labels_in(store, find_step(store, 4)).values() if label is not None]
    assert whole_micro_batches(labels) == (0, 4)


def test_headers_are_json_that_other_readers_understand(store: Store) -> None:
    data = store.get(f"{step_folder(4)}/{write(store, 4)}")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(header) == {"__metadata__", "sums", "statistics"}


def test_they_outlast_the_commit_of_their_checkpoint_and_go_with_the_next(store: Store) -> None:
    """They may be there before the manifest is."""
    plan = make_plan(1, 2)
    shards = save_parts(store, 4, plan)
    file = write(store, 4)
    commit(store, assemble(4, plan, shards))
    retain(store, 4, Kept(last=2))
    assert sums_in(store, 4) == [file]
    save(store, 6)
    retain(store, 6, Kept(last=2))
    assert sums_in(store, 4) == []
    assert find_step(store, 4).is_committed


def test_they_outlast_a_damaged_checkpoint_of_their_step(store: Store) -> None:
    """Whether they belong to the new one, their fingerprint says."""
    save(store, 4)
    file = write(store, 4)
    mark_damaged(store, 4, "wrong")
    save(store, 4, generation=1)
    assert sums_in(store, 4) == [file]


def test_a_fingerprint_is_of_what_is_computed_with() -> None:
    """Masters in fp32 and their copies in bf16 have the same; every update changes it."""
    values: dict[str, Tensor] = {"b": torch.randn(40), "a": torch.randn(3, 5)}
    copies = {name: values[name].bfloat16() for name in ("a", "b")}
    assert fingerprint(values, torch.bfloat16) == fingerprint(copies, torch.bfloat16)
    assert fingerprint(values, torch.float32) != fingerprint(copies, torch.float32)
    changed = {**values, "a": values["a"] * 1.001}
    assert fingerprint(values, torch.float32) != fingerprint(changed, torch.float32)


def test_sections_are_those_of_the_saves() -> None:
    assert parse_sums_file(sums_file(SECTIONS - 1, 0, "0123456789abcdef", 3)) == SECTIONS - 1
    assert parse_sums_file("section-000.0of1.g1.0123456789abcdef.safetensors") is None
