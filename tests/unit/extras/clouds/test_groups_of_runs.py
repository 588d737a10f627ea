"""One group serves one run: another run of this user's is refused while the first one's manager lives."""

from pathlib import Path

import pytest

from tests.unit.extras.clouds.group_servers import Azure
from tests.unit.extras.clouds.test_groups import scale_set
from tests.unit.fleet.metadata import serving
from varuna.core.errors import UsageError
from varuna.extras.clouds.engines import GroupEngine
from varuna.fleet.engines.engine import EnginePlace
from varuna.fleet.run_folder.connection_file import Access, publish_access
from varuna.process.file_lock import own


def test_a_group_that_another_living_run_uses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first, second = tmp_path / "first", tmp_path / "second"
    Azure.begin()
    with serving(Azure) as url:

        def engine(run_dir: Path, key: str = "azure trainers") -> GroupEngine:
            run_dir.mkdir(exist_ok=True)
            return GroupEngine(scale_set(url), key, EnginePlace(run_dir=run_dir, most=4))

        engine(first).resize(2)
        publish_access(first, Access(host="127.0.0.1", port=1, certificate_pem=None, token="t" * 20))
        engine(second)  # nobody manages the first one now
        manager = own(first, "manager", remedy="")
        with pytest.raises(UsageError, match=rf"the run in {first} uses scale set trainers.*varuna stop --run {first}"):
            engine(second)
        engine(second, "azure others")
        engine(first)  # it goes on itself
        manager.release()
        giving = engine(first)
        giving.resize(2)
        giving.close()
        manager = own(first, "manager", remedy="")
        engine(second)
        manager.release()
