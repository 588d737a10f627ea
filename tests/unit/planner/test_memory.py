from tests.unit.planner.models import MB, model, section
from varuna.core.model import TiedParameter
from varuna.planner.memory import largest_stash, stage_memory


def test_a_stage_needs_state_stash_one_live_set_and_messages() -> None:
    memory = stage_memory(model([section()] * 4), range(1, 3), micro_batch=2, stash=5)
    assert memory.parameters == 200 * MB
    assert memory.gradients == 200 * MB
    assert memory.optimizer == 400 * MB
    assert memory.stash == 5 * 2 * 2 * MB
    assert memory.live == 2 * 50 * 2 * MB
    assert memory.messages == 2 * (4 + 4) * MB
    assert memory.total == (200 + 200 + 400 + 20 + 200 + 16) * MB


def test_the_ends_of_the_pipeline_have_no_neighbour() -> None:
    whole = stage_memory(model([section()] * 4), range(4), micro_batch=2, stash=5)
    assert (whole.stash, whole.messages) == (0, 0)


def test_a_tied_parameter_counts_once_within_a_stage_but_accumulates_gradients_per_section() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 2), size_bytes=40 * MB),)
    plain, shared = (stage_memory(model([section()] * 3, t), range(3), micro_batch=1, stash=1) for t in ((), tied))
    assert plain.parameters - shared.parameters == 40 * MB
    assert plain.optimizer - shared.optimizer == 80 * MB
    assert plain.gradients == shared.gradients


def test_a_tied_parameter_counts_in_every_stage_that_holds_it() -> None:
    tied = (TiedParameter(name="wte", sections=(0, 2), size_bytes=40 * MB),)
    ends = [stage_memory(model([section()] * 3, tied), range(k, k + 1), micro_batch=1, stash=1) for k in (0, 2)]
    assert [end.parameters for end in ends] == [100 * MB, 100 * MB]


def test_the_stash_takes_what_room_is_left() -> None:
    facts = model([section()] * 4)
    room = stage_memory(facts, range(1, 2), micro_batch=1, stash=0).total + 7 * MB

    def depth(memory_bytes: int, wanted: int) -> int:
        return largest_stash(facts, range(1, 2), micro_batch=1, memory_bytes=memory_bytes, wanted=wanted, least=2)

    assert [depth(room, 9), depth(room, 3), depth(0, 9)] == [3, 3, 2]


def test_the_first_stage_stashes_nothing_of_size() -> None:
    facts = model([section()] * 4)
    assert largest_stash(facts, range(1), micro_batch=1, memory_bytes=0, wanted=9, least=1) == 9
