"""``GET /metrics`` is read by Prometheus's own parser, and the Grafana dashboard asks for what it says."""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from varuna.fleet.manager.prometheus import exposition, scraper_token

DASHBOARD = Path(__file__).parents[4] / "deploy" / "grafana" / "varuna.json"
STATUS: dict[str, Any] = {
    "state": "training",
    "step": 41,
    "steps": 100,
    "loss": float("nan"),
    "examples_per_s": 1234.5,
    "plan": {"stages": 3, "replicas": 2},
    "nodes": ["n0", "n1"],
    "workers": [
        {"state": "joined", "silent_s": 0.5},
        {"state": "put aside", "silent_s": 7.25},
        {"state": "starting", "silent_s": None},
    ],
    "generations": [
        {"recovery_s": 0.5, "steps_redone": 2},
        {"recovery_s": 0.25, "steps_redone": None},
        {"recovery_s": None, "steps_redone": None},
    ],
    "lost_workers": 4,
    "checkpoint": {"step": 40, "time_s": 1000.25},
    "still_s": 840.5,
    "waits_for": 'P=4 was requested, but there is 1 worker (worker "n1.0" closed\nits connection)',
    "wanted": 4,
    "began_s": 100.0,
    "disk_free_bytes": 2**30,
}


def read(status: dict[str, Any]) -> dict[str, float]:
    """Samples by name and label."""
    families = list(text_string_to_metric_families(exposition(status)))
    assert all(family.documentation.endswith(".") for family in families)
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_run_is_told_in_the_format_of_prometheus() -> None:
    found = read(STATUS)
    assert str(found.pop("varuna_loss")) == "nan"
    assert {name: value for name, value in found.items() if not name.startswith("varuna_state[")} == {
        "varuna_step": 41,
        "varuna_steps": 100,
        "varuna_examples_per_second": 1234.5,
        "varuna_stages": 3,
        "varuna_replicas": 2,
        "varuna_stands_still_seconds": 840.5,
        "varuna_workers_wanted": 4,
        "varuna_checkpoint_timestamp_seconds": 1000.25,
        "varuna_disk_free_bytes": 2**30,
        "varuna_nodes": 2,
        "varuna_workers[joined]": 1,
        "varuna_workers[put aside]": 1,
        "varuna_workers[starting]": 1,
        "varuna_silent_seconds": 7.25,
        "varuna_generations_total": 3,
        "varuna_redone_steps_total": 2,
        "varuna_recovery_seconds": 0.25,
        "varuna_lost_workers_total": 4,
        "varuna_checkpoint_step": 40,
    }
    assert [name for name, value in found.items() if name.startswith("varuna_state[") and value] == [
        "varuna_state[training]"
    ]


def test_what_is_not_known_yet_is_left_out() -> None:
    found = read({"state": "starting: waiting for 2 workers", "step": None, "loss": None, "steps": 0, "plan": None})
    assert found["varuna_state[starting]"] == 1
    assert not {"varuna_step", "varuna_loss", "varuna_steps", "varuna_stages"} & set(found)
    assert read({"state": "ended with exit code 1"})["varuna_state[ended]"] == 1


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = set(re.findall(r"varuna_\w+", json.dumps(panels)))
    assert asked == {name.split("[")[0] for name in read(STATUS)}


def test_a_run_that_stands_still_says_for_how_long_and_another_one_zero() -> None:
    """Reasons are in ``/status``: a text that changes would be another time series at each look."""
    assert read(STATUS)["varuna_stands_still_seconds"] == 840.5
    assert read({**STATUS, "still_s": None, "waits_for": None})["varuna_stands_still_seconds"] == 0


def test_the_age_of_checkpoints_counts_from_the_beginning_of_the_run() -> None:
    assert read(STATUS)["varuna_checkpoint_timestamp_seconds"] == 1000.25
    assert read({**STATUS, "checkpoint": None})["varuna_checkpoint_timestamp_seconds"] == 100.0


def test_the_scrapers_token_is_not_the_operators() -> None:
    assert scraper_token("") == ""
    assert len({scraper_token("a"), scraper_token("b"), "a", "b"}) == 4
