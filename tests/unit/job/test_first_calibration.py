"""The first plan's calibration is given, remembered, or measured."""

from pathlib import Path

import pytest

import varuna.job.first_calibration
from tests.unit.engine.models import SmallLanguage, Tokens, adamw
from tests.unit.engine.ranks import single_threaded
from varuna.calibration.cache import cache_file, remember
from varuna.calibration.file import write_calibration
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.errors import UsageError
from varuna.job.first_calibration import first_calibration
from varuna.job.spec import JobSpec
from varuna.job.start import engine_job, job_facts
from varuna.timing.quick import LIMIT_S


def job_of(micro_batch: int | None = None) -> JobSpec:
    return JobSpec(SmallLanguage, Tokens(), adamw, 8, micro_batch=micro_batch)


def first(spec: JobSpec) -> Calibrations | None:
    with single_threaded():
        job = engine_job(spec, spec.partitioned, {})
        return first_calibration(spec, job_facts(spec, 1), job, spec.beginning())


def of_another_model(known: Calibrations) -> Calibrations:
    model = known.first.model.model_copy(update={"digest": "other" * 8})
    return known.each(lambda each: each.model_copy(update={"model": model}))


def test_a_job_is_measured_once_on_a_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job_of()
    assert first(spec) is None, "VARUNA_CALIBRATION=none"
    monkeypatch.delenv("VARUNA_CALIBRATION")
    measured = first(spec)
    assert measured is not None
    assert measured.first.sizes[:3] == (1, 2, 4)
    assert "measuring micro-batch sizes" in capsys.readouterr().err
    assert first(spec) == measured
    assert first(job_of(micro_batch=2)) == measured
    assert capsys.readouterr().err == ""


@pytest.mark.nightly
def test_nothing_is_measured_where_m_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VARUNA_CALIBRATION")
    assert first(job_of(micro_batch=2)) is None


@pytest.mark.nightly
def test_one_size_of_an_earlier_run_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job_of()
    with single_threaded():
        remember(Calibrations.of_one(nominal_calibration(spec.partitioned.facts)), cache_file(job_facts(spec, 1)))
    monkeypatch.delenv("VARUNA_CALIBRATION")
    measured = first(spec)
    assert measured is not None
    assert len(measured.first.sizes) > 1


@pytest.mark.nightly
def test_what_time_had_cut_short_is_measured_once_more_and_no_third_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job_of()
    limits: list[float] = []

    def short(*args: object, limit_s: float, **others: object) -> Calibrations:
        limits.append(limit_s)
        return Calibrations.of_one(nominal_calibration(spec.partitioned.facts))

    monkeypatch.setattr(varuna.job.first_calibration, "quick_calibration", short)
    monkeypatch.delenv("VARUNA_CALIBRATION")
    found = [first(spec) for _ in range(3)]
    assert limits == [LIMIT_S, 2 * LIMIT_S]
    assert [each.first.sized_for for each in found if each is not None] == [0, 8, 8]


class OtherWorkers:
    """The run, to a worker that has not joined."""

    def __init__(self, found: bytes) -> None:
        self.found, self.offered = found, list[bytes]()

    def seek_work(self, key: str, what: str) -> bytes:
        assert key.startswith("times of ")
        return self.found

    def offer_work(self, key: str, data: bytes) -> None:
        self.offered.append(data)


@pytest.mark.nightly
def test_a_class_of_devices_is_measured_once_in_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = job_of()
    monkeypatch.delenv("VARUNA_CALIBRATION")

    def on_a_new_machine(name: str, run: OtherWorkers) -> Calibrations:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        monkeypatch.setattr(varuna.job.first_calibration, "manager", lambda: run)
        found = first(spec)
        assert found is not None
        return found

    nobody = OtherWorkers(b"")
    measured = on_a_new_machine("one", nobody)
    assert "measuring micro-batch sizes" in capsys.readouterr().err
    assert nobody.offered == [measured.model_dump_json().encode()]
    first_one = OtherWorkers(*nobody.offered)
    assert on_a_new_machine("two", first_one) == measured
    assert first_one.offered == []
    assert capsys.readouterr().err == ""
    assert on_a_new_machine("two", OtherWorkers(b"not asked")) == measured, "the machine remembers it"
    foreign = of_another_model(measured)
    for unusable in (b"{}", foreign.model_dump_json().encode()):
        on_a_new_machine(f"three {len(unusable)}", OtherWorkers(unusable))
        assert "measuring micro-batch sizes" in capsys.readouterr().err


def test_the_users_calibration_counts_before_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = job_of()
    nominal = Calibrations.of_one(nominal_calibration(spec.partitioned.facts))
    write_calibration(nominal, tmp_path / "own.json")
    monkeypatch.setenv("VARUNA_CALIBRATION", str(tmp_path / "own.json"))
    assert first(spec) == nominal
    write_calibration(of_another_model(nominal), tmp_path / "own.json")
    with pytest.raises(UsageError, match="digest otherothe"):
        first(spec)
    monkeypatch.setenv("VARUNA_CALIBRATION", str(tmp_path / "missing.json"))
    with pytest.raises(UsageError, match="cannot read a calibration"):
        first(spec)
