"""Points at which the core asks for what a run can do without; the core imports no extra."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "commands": (
        "varuna.extras.replay.offers:register",
        "varuna.extras.pictures.simulate:register",
        "varuna.extras.replay.command:register",
        "varuna.extras.demo.command:register",
        "varuna.extras.pictures.command:register",
        "varuna.extras.doctor.command:register",
    ),
    "engines": (
        "varuna.extras.ray.engine:RAY",
        "varuna.extras.clouds.engines:AWS",
        "varuna.extras.clouds.engines:AZURE",
        "varuna.extras.clouds.engines:GCP",
        "varuna.extras.clouds.engines:K8S",
    ),
    "runs elsewhere": ("varuna.extras.ray.follower:access_of",),
    "worlds": ("varuna.extras.torchrun.server:TorchrunServer",),
    "page": ("varuna.extras.page.routes:page_routes",),
    "pictures of steps": ("varuna.extras.pictures.step_sheet:drawn",),
    "charts": ("varuna.extras.trackers.of_job:trackers_of",),
}
"""Offers of extras, as ``module:name``, by the point that asks for them."""


def extras(point: str) -> list[Any]:
    """Import what extras offer for ``point``, in the order of the table."""
    found = []
    for place in EXTRAS[point]:
        module, _, name = place.partition(":")
        found.append(getattr(import_module(module), name))
    return found
