import pytest

from varuna.calibration.fit import assemble, link_of
from varuna.calibration.nominal import ETHERNET
from varuna.calibration.samples import Measured, PilotSamples, RingSamples, SectionSamples, Sized
from varuna.core.errors import WorkerError
from varuna.core.model import ModelFacts, SectionFacts


def facts() -> ModelFacts:
    first = SectionFacts(
        label="embed",
        forward_s=1.0,
        parameter_bytes=40,
        trainable_bytes=40,
        optimizer_bytes=80,
        activation_bytes=10,
        boundary_bytes=4,
    )
    rest = [first.model_copy(update={"label": f"layer{i}", "parameter_bytes": 20}) for i in range(3)]
    return ModelFacts(digest="d", sections=(first, *rest))


def measured(**changes: object) -> Measured:
    sections = [
        SectionSamples(
            section=section,
            micro_batch=m,
            forward_s=(m * 1.0, m * 1.0, m * 9.0),
            recompute_s=(m * 1.5,),
            backward_s=(m * 2.0,),
        )
        for m in (2, 1)
        for section in (0, 1)
    ]
    plain = Measured(
        worker=0,
        hardware="abacus",
        device_bytes=None,
        facts=facts(),
        kinds=(0, 1, 1, 1),
        sections=tuple(sections),
        updates=(Sized(100, 0.3), Sized(300, 0.5)),
        snapshots=(Sized(100, 0.1), Sized(300, 0.3)),
        arrivals=(Sized(100, 0.1), Sized(300, 0.2)),
    )
    return plain.model_copy(update=changes)


def test_kinds_take_the_mean_of_all_rounds_and_workers_without_hiccups() -> None:
    slower = SectionSamples(section=1, micro_batch=1, forward_s=(1.4,) * 2, recompute_s=(7.0,), backward_s=(7.0,))
    calibration = assemble([measured(), measured(worker=1, sections=(slower,))], name="tiny")
    assert [(run.kinds, run.count) for run in calibration.sections] == [(("embed (0)",), 1), (("layer0 (1)",), 3)]
    assert calibration.kinds["embed (0)"].micro_batches == (1, 2)
    assert calibration.kinds["embed (0)"].forward_s == (1.0, 2.0)
    assert calibration.kinds["layer0 (1)"].forward_s == pytest.approx((1.2, 2.0)), "of 1, 1, 1.4, 1.4; 9 was a hiccup"
    assert calibration.kinds["layer0 (1)"].parameter_bytes == 20
    assert calibration.kinds["embed (0)"].input_s == (), "nothing was split"


def test_copies_have_rates_of_their_own() -> None:
    calibration = assemble([measured()], name="tiny")
    assert calibration.snapshot_bytes_per_s == pytest.approx(1000)
    assert calibration.to_device_bytes_per_s == pytest.approx(2000)
    assert assemble([measured(arrivals=())], name="tiny").to_device_bytes_per_s is None


def test_what_was_not_measured_is_assumed_and_said() -> None:
    calibration = assemble([measured()], name="tiny")
    assert calibration.across_vms == ETHERNET
    assert any("Ethernet" in note for note in calibration.notes)
    assert any("cost of an action is assumed" in note for note in calibration.notes)


def test_real_steps_say_what_an_action_and_a_step_cost_beyond_their_sections() -> None:
    alone = PilotSamples(
        stages=1,
        state_bytes=100,
        whole_s={"F": 9.0, "B": 5.5},
        inside_s={"F": 5.0, "B": 5.0},
        step_s=(1.1, 1.1, 9.0),
    )
    taken_s = {"F": 9.0, "R": 5.3, "B": 9.0}
    deep = alone.model_copy(update={"stages": 2, "whole_s": taken_s, "inside_s": dict.fromkeys("FRB", 5.0)})
    last = deep.model_copy(update={"whole_s": {"F": 9.0, "B": 9.0}, "step_s": ()})
    assert assemble([measured(pilots=(alone,))], name="tiny").action_s == pytest.approx(0.5)
    calibration = assemble([measured(pilots=(alone, deep, last))], name="tiny")
    assert calibration.action_s == pytest.approx(0.3), "of the deepest pipeline, and of what moves no message"
    assert calibration.optimizer.bytes_per_s == pytest.approx(1000)
    assert calibration.optimizer.fixed_s == pytest.approx(1.0), "1.1 s without the 0.1 s for its bytes"


def test_messages_cost_what_forwards_and_backwards_of_a_pipeline_take_beyond_its_recomputes() -> None:
    # In place: F 1, R 1.5, B 2 for each of two sections; the machine was twice as busy while the pipeline ran.
    busy = PilotSamples(
        stages=2,
        state_bytes=0,
        first=1,
        stop=3,
        whole_s={"F": 4.0 + 0.1 + 0.3, "R": 6.0 + 0.1, "B": 8.0 + 0.1 + 0.3},
        inside_s={"F": 4.2, "R": 6.0, "B": 8.2},
        step_s=(),
    )
    last = busy.model_copy(update={"whole_s": {"F": 9.0, "B": 9.0}})
    calibration = assemble([measured(pilots=(busy, last))], name="tiny")
    assert calibration.action_s == pytest.approx(0.1)
    assert calibration.hand_over_s == pytest.approx(0.3), "beyond what every action takes: counted once"
    assert assemble([measured()], name="tiny").hand_over_s == 0
    first = busy.model_copy(update={"first": 0, "stop": 2, "whole_s": {**busy.whole_s, "B": 8.0 + 0.1}})
    found = assemble([measured(pilots=(first, last))], name="tiny").hand_over_s
    assert found == pytest.approx(0.3), "its backward gives nothing"


def test_reading_samples_costs_what_forwards_of_one_stage_take_beyond_its_backwards() -> None:
    # In place: R 1.5, B 2 for each of two sections; the machine was twice as busy while the worker was alone.
    alone = PilotSamples(
        stages=1,
        state_bytes=0,
        first=1,
        stop=3,
        whole_s={"F": 6.0 + 0.1 + 0.4, "B": 8.0 + 0.1},
        inside_s={"F": 6.4, "B": 8.0},
        step_s=(),
    )
    calibration = assemble([measured(pilots=(alone,))], name="tiny")
    assert calibration.samples_s == pytest.approx(0.4)
    assert calibration.hand_over_s == 0


def test_a_ring_is_read_as_rounds_of_latency_and_rate() -> None:
    ring = RingSamples(ranks=4, in_flight=1, samples=tuple(Sized(size, 0.6 + size * 0.003) for size in (0, 1000, 4000)))
    crossed = measured(rings=(ring,), messages=(Sized(64, 0.1), Sized(1064, 1.1)))
    calibration = assemble([crossed], name="tiny")
    [found] = calibration.across_vms.rings
    assert found.latency_s == pytest.approx(0.1)
    assert found.bytes_per_s == pytest.approx(500), "six rounds of a quarter of the bytes in 3 ms per byte"
    on_gpu = assemble([crossed.model_copy(update={"device_bytes": 16})], name="tiny")
    assert (on_gpu.hardware.memory_bytes, on_gpu.hardware.reserved_bytes) == (16, 8)
    assert (calibration.hardware.memory_bytes, calibration.hardware.reserved_bytes) == (None, 0)
    assert set(on_gpu.notes) - set(calibration.notes) == {
        "messages and all-reduces begin and end in the memory of the GPU"
    }


def test_jitter_is_what_messages_of_a_size_take_beyond_their_fastest() -> None:
    late = [0.1 * i for i in range(101)]
    link = link_of([*(Sized(8, 100 + each) for each in late), *(Sized(1008, 1100 + each) for each in late)])
    assert link.latency_s == pytest.approx(101.0)
    assert link.bytes_per_s == pytest.approx(1.0)
    assert link.jitter.quantiles_s[0] == 0
    assert link.jitter.quantiles_s[5] == pytest.approx(4.0)
    assert link.jitter.mean_s == pytest.approx(4.0, rel=0.1)


def test_what_messages_of_a_gpu_take_longer_is_their_copies() -> None:
    sizes = (8, 1008, 4008)
    messages = [Sized(size, 100 + size) for size in sizes for _ in range(5)]
    staged = [Sized(size, 100 + size + 20 + size / 4) for size in sizes for _ in range(5)]
    plain, link = link_of(messages), link_of(messages, staged)
    assert (plain.staged_s, plain.staged_bytes_per_s) == (0.0, None)
    assert (link.latency_s, link.bytes_per_s, link.jitter) == (plain.latency_s, plain.bytes_per_s, plain.jitter)
    assert link.staged_s == pytest.approx(22)
    assert link.staged_bytes_per_s == pytest.approx(4)
    assert link.latency_of(400) == pytest.approx(108 + 22 + 100)
    noisy = link_of(messages, [Sized(size, 99 + size / 2) for size in sizes])
    assert (noisy.staged_s, noisy.staged_bytes_per_s) == (0.0, None), "copies that take less than nothing are noise"


def test_two_neighbours_at_once_tell_how_wide_the_line_is() -> None:
    messages = [Sized(size, 100 + size) for size in (8, 1008) for _ in range(5)]
    one = link_of(messages, (), [Sized(2 * size, 130 + 2 * size) for size in (8, 1008) for _ in range(5)])
    assert one.line_bytes_per_s == pytest.approx(1.0)
    assert one.line_share == pytest.approx(1.0)
    wide = link_of(messages, (), [Sized(2 * size, 130 + size) for size in (8, 1008) for _ in range(5)])
    assert wide.line_bytes_per_s == pytest.approx(2.0)
    assert wide.line_share == pytest.approx(0.5)
    assert link_of(messages).line_bytes_per_s is None
    assert link_of(messages).line_share == 1.0, "one line, where nobody has measured it"
    slower = wide.at(latency_s=1.0, bytes_per_s=0.1)
    assert slower.line_bytes_per_s == pytest.approx(0.2)
    assert slower.line_share == pytest.approx(0.5)


def test_workers_with_different_models_are_not_mixed() -> None:
    other = measured(worker=1, facts=facts().model_copy(update={"digest": "e"}))
    with pytest.raises(WorkerError, match="different models"):
        assemble([measured(), other], name="tiny")


def test_a_kind_that_nobody_measured_is_named() -> None:
    with pytest.raises(WorkerError, match=r"section 1 \(layer0\) was not measured by any worker"):
        assemble([measured(sections=tuple(s for s in measured().sections if s.section == 0))], name="tiny")
