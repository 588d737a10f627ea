"""``varuna run --on ENGINE --dry-run``, from the command line to a local server that speaks the cloud's API."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.extras.clouds.group_servers import TOKEN, Google, Kubernetes
from tests.unit.fleet.metadata import serving
from varuna.cli import main as cli
from varuna.extras.clouds import gcp
from varuna.extras.clouds.rest import Rest, RestAnswer
from varuna.fleet.net.bounded_http import HttpRequest


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["varuna", "run", *words])
    try:
        return cli.main()
    except SystemExit as left:
        return int(left.code or 0)


def test_a_dry_run_shows_the_call_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    Google.begin()
    words = ("--on", "gcp:p-1/us-central1-a/trainers", "--nodes", "2:9", "--run-dir", str(tmp_path / "run"))
    found = SimpleNamespace(valid=True, token=TOKEN)
    monkeypatch.setattr(pytest.importorskip("google.auth"), "default", lambda scopes: (found, "p-1"))
    with serving(Google) as url:
        monkeypatch.setenv(gcp.ENDPOINT_VARIABLE, f"{url}/compute/v1/")
        assert run(monkeypatch, *words, "--dry-run", str(script)) == 0
        assert capsys.readouterr().out == f"POST {url}{Google.PATH}/resize?size=9\n"
    assert (Google.desired, Google.asked) == (1, [])
    assert not (tmp_path / "run").exists()


def test_kubectl_proxy_is_enough_outside_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    Kubernetes.begin()
    send = Rest.send

    def proxied(api: Rest, asked: HttpRequest) -> RestAnswer:
        """The proxy adds who the user is."""
        return send(api, asked._replace(headers={**asked.headers, "Authorization": f"Bearer {TOKEN}"}))

    monkeypatch.setattr(Rest, "send", proxied)
    with serving(Kubernetes) as url:
        words = ("--on", "k8s:ml/agents", "--api-server", url, "--nodes", "4", "--dry-run", str(script))
        assert run(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert shown == f'PATCH {url}{Kubernetes.PATH} {{"spec": {{"replicas": 4}}}}\n'
    assert run(monkeypatch, "--on", "k8s", "--nodes", "4", str(script)) == 2
    assert "is no pod with a service account" in capsys.readouterr().err
