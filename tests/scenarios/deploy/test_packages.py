"""The wheel, the sdist and the image's steps, from a copy of this repository; nothing is downloaded."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from varuna.extras.page.files import ASSETS

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
SOURCES = ("varuna", "examples", "docs", "deploy", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile")
pytest.importorskip("hatchling")


def copy(folder: Path) -> Path:
    """As a clone has it; every file gets the time of now."""
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile
            )
        else:
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(source: Path, target: Path, *kinds: str) -> list[Path]:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(target), *kinds],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return sorted(target.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    [found] = build(copy(folder / "source"), folder / "dist", "--target", "wheel")
    return found


@pytest.mark.nightly
def test_two_builds_are_equal_byte_by_byte(tmp_path: Path, wheel: Path) -> None:
    first = build(copy(tmp_path / "here"), tmp_path / "first")
    (tmp_path / "elsewhere").mkdir()
    second = build(copy(tmp_path / "elsewhere" / "there"), tmp_path / "second")
    assert [path.suffix for path in first] == [".whl", ".gz"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes() == wheel.read_bytes()
    with tarfile.open(first[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "deploy/Dockerfile", "varuna/py.typed"} <= names


def test_the_wheel_has_what_it_needs_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        licence = files.read("varuna_train-0.1.0.dist-info/licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert {name.partition("/")[0] for name in names} == {"varuna", "varuna_train-0.1.0.dist-info"}
    assert {"varuna/py.typed", "varuna/extras/page/files/index.html", "varuna/_examples/gpt2_text/train.py"} <= set(
        names
    )
    assert {f"varuna/extras/page/files/{name}" for name in ASSETS} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_works_without_the_repository_and_manages_without_torch(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None, transformers=None); import varuna; "
        f"assert varuna.__file__.startswith({str(site)!r}), varuna.__file__; "
        "import varuna.planner.choose, varuna.fleet.service.service, varuna.fleet.agent.agent; "
        "import varuna.extras.replay.replay; "
        "sys.argv = ['varuna', *sys.argv[1:]]; from varuna.cli.main import main; sys.exit(main())"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )

    simulated = run("simulate", "--unit", "--stages", "4", "--micro-batches", "8")
    assert simulated.returncode == 0, simulated.stderr
    demo = run("demo")
    assert (demo.returncode, demo.stdout) == (2, "")
    assert "pip install 'torch>=2.11,<2.16' transformers" in demo.stderr
    assert "Traceback" not in demo.stderr
    assert list(empty.iterdir()) == []


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.nightly
def test_the_images_steps_work_one_by_one(tmp_path: Path) -> None:
    """No builder of images can run here: what is copied is copied, and the build is run; installing needs a network."""
    source = copy(tmp_path / "src")
    shutil.copyfile(ROOT / ".dockerignore", source / ".dockerignore")
    allowed = [line[1:] for line in (source / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    image = tmp_path / "image"
    image.mkdir()
    copied = [rest.split() for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    for *files, target in copied:
        for file in files:
            assert file in allowed, f"{file} is not in the build's context"
            to = image / (file if target == "./" else target)
            copying = shutil.copytree if (source / file).is_dir() else shutil.copyfile
            copying(source / file, to)
    steps = [rest for name, rest in instructions() if name == "RUN"]
    [building] = [step for step in steps if "hatchling build" in step]
    done = subprocess.run(
        ["/bin/sh", "-c", building.replace("/dist", str(tmp_path / "dist"))],
        cwd=image,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in (tmp_path / "dist").iterdir()] == [".whl"]
    for step in steps:
        assert subprocess.run(["/bin/sh", "-nc", step], timeout=20).returncode == 0
    [installing] = [step for step in steps if "torch==" in step and ".whl" not in step]
    pinned = re.search(r"^PINNED_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned is not None
    asked = "pip install --no-cache-dir"
    assert installed(installing, "", tmp_path) == f"{asked} torch=={pinned[1]}"
    assert installed(installing, "file:///wheels", tmp_path) == f"{asked} --index-url file:///wheels torch=={pinned[1]}"


def installed(step: str, index: str, folder: Path) -> str:
    """Run a step that installs with a false pip; return the command that pip was given."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "pip").write_text('#!/bin/sh\necho pip "$@"\n')
    (folder / "bin" / "pip").chmod(0o755)
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "TORCH_INDEX": index}
    done = subprocess.run(["/bin/sh", "-c", step], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_charts_user_is_the_images() -> None:
    users = [rest for name, rest in instructions() if name == "USER"]
    values = (ROOT / "deploy" / "helm" / "varuna" / "values.yaml").read_text()
    assert [f"runAsUser: {user}" in values for user in users] == [True]
