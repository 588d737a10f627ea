"""Frozen parameters that pass through a stage's device: the places for them, and seconds that they take."""

from varuna.planner.pricing.profile import Profile
from varuna.schedule.buffers import FROZEN_PLACES


def are_streamed(profile: Profile, start: int, stop: int) -> bool:
    """Whether places for those of sections [start, stop) take less memory than all, so that they pass through."""
    return profile.streamed_bytes.before[-1] > 0 and _of_places(profile, start, stop) < _of_all(profile, start, stop)


def on_device_bytes(profile: Profile, start: int, stop: int) -> int:
    """Device memory for them."""
    return int(min(_of_places(profile, start, stop), _of_all(profile, start, stop)))


def pass_s(profile: Profile, start: int, stop: int) -> float:
    """Seconds in which all of them come to the device once, as for each F, R and B."""
    if not are_streamed(profile, start, stop):
        return 0.0
    return _of_all(profile, start, stop) / profile.calibration.crossing_bytes_per_s


def _of_all(profile: Profile, start: int, stop: int) -> float:
    return profile.streamed_bytes.before[stop] - profile.streamed_bytes.before[start]


def _of_places(profile: Profile, start: int, stop: int) -> float:
    return FROZEN_PLACES * profile.most_streamed_bytes.over(start, stop)
