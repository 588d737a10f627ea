"""The operator API: who may look, who may change, and what is written down."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient

from tests.depth import by_depth
from varuna.extras.page.files import ASSETS
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.manager.prometheus import CONTENT_TYPE, scraper_token
from varuna.fleet.net import requests
from varuna.fleet.page.logins import LINK_LIFE_S, Logins
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.state.inputs import DrainRequested, Event, FinishRequested, MorphRequested, SaveRequested
from varuna.fleet.state.run_events import Audited

OPERATOR = {"Authorization": "Bearer operator-token"}
CHANGES = ("stop", "morph", "drain", "checkpoint", "tokens", "tokens/void")


class Front:
    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.sent_away: list[str] = []
        self.audited: list[Audited] = []
        self.now_s = 0.0
        self.checkpoints: str | None = "s3://bucket/run"
        self.rescues = False
        door = OperatorApi(
            status=lambda: {
                "loss": float("nan"),
                "steps": 3,
                "nodes": ["n0-vm"],
                "checkpoint_dir": self.checkpoints,
                "rescues": self.rescues,
            },
            logs=folder,
            ask=self.ask,
            audit=Audit(self.audited.append, lambda: self.now_s),
            mint=lambda uses, life_s: f"varuna://{uses}-{life_s:.0f}",
            void_tokens=lambda: 3,
            send_away=self.send_away,
            operator_token="operator-token",
        )
        self.is_busy = False
        self.client = TestClient(Starlette(routes=door.routes()), raise_server_exceptions=True)

    def send_away(self, node: str) -> bool:
        self.sent_away.append(node)
        return node in ("n0-vm", "n1-away")

    def ask(self, event: Event) -> bool:
        self.events.append(event)
        return not self.is_busy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    (folder / "n0-vm.0.log").write_bytes(b"one\ntwo\n")
    (folder.parent / "secret.log").write_text("secret")
    return folder


@pytest.fixture
def front(folder: Path) -> Iterator[Front]:
    front = Front(folder)
    with front.client:
        yield front


def bearer_of(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def log_in(front: Front) -> dict[str, str]:
    code = front.client.post("/links", headers=OPERATOR).json()["code"]
    return bearer_of(front.client.post("/login", json={"code": code}).json()["session"])


def test_readers_need_a_session_which_a_link_gives_once(front: Front) -> None:
    client = front.client
    for headers in ({}, bearer_of("guess"), {"Cookie": "varuna_token=guess"}):
        assert client.get("/status", headers=headers).status_code == 401
    assert client.get("/status", headers=OPERATOR).status_code == 200
    assert client.post("/links").status_code == 401
    code = client.post("/links", headers=OPERATOR).json()["code"]
    assert client.get("/status", headers=bearer_of(code)).status_code == 401
    answer = client.post("/login", json={"code": code})
    session = bearer_of(answer.json()["session"])
    status = client.get("/status", headers=session)
    assert (status.status_code, status.json()["loss"], status.json()["steps"]) == (200, None, 3)
    assert client.get("/logs/n0-vm.0", headers=session).status_code == 200
    assert client.post("/stop", headers=session).status_code == 401
    again = client.post("/login", json={"code": code})
    assert (again.status_code, "varuna open" in again.json()["error"]) == (403, True)
    assert client.post("/login", json={"code": "x" * 65}).status_code == 422
    assert status.headers["cache-control"] == answer.headers["cache-control"] == "no-store"
    assert client.post("/links/void", headers=OPERATOR).json() == {"void": 1}
    assert client.get("/status", headers=session).status_code == 401
    assert [line.action for line in front.audited if line.allowed] == [
        "make a link to the page",
        "open the page",
        "void all links to the page",
    ]


def test_the_token_of_scrapers_reads_the_metrics_and_nothing_else(front: Front) -> None:
    scraper = {"Authorization": f"Bearer {scraper_token('operator-token')}"}
    answer = front.client.get("/metrics", headers=scraper)
    assert (answer.status_code, "varuna_steps 3.0" in answer.text) == (200, True)
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert front.client.get("/metrics", headers=OPERATOR).status_code == 200
    assert front.client.get("/metrics").status_code == 401
    for path in ("/status", "/hosts", "/logs/n0-vm.0"):
        assert front.client.get(path, headers=scraper).status_code == 401
    assert front.client.post("/stop", headers=scraper).status_code == 401


def test_the_page_says_nothing_of_the_run_leaves_no_cookie_and_runs_its_own_files_alone(front: Front) -> None:
    page = front.client.get("/")
    assert page.status_code == 200
    assert "set-cookie" not in page.headers
    assert page.headers["referrer-policy"] == "no-referrer"
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.findall(r"<script(?! type=\"module\" src=\"page/)|<style|style=|\son\w+=|https?:", page.text)
    for name, media_type in ASSETS.items():
        file = front.client.get(f"/page/{name}")
        assert (file.status_code, file.headers["content-type"]) == (200, media_type)
        assert file.headers["x-content-type-options"] == "nosniff"
        for risk in ("innerHTML", "document.cookie", "localStorage", "eval(", "document.write", "//cdn"):
            assert risk not in file.text
    for strange in ("..%2F__init__.py", "__init__.py", "index.html", "nothing.js"):
        assert front.client.get(f"/page/{strange}").status_code == 404


def test_links_and_sessions_have_an_end_and_a_number() -> None:
    now = [0.0]
    logins = Logins(lambda: now[0])
    late, code = logins.invite(), logins.invite()
    session = logins.redeem(code)
    assert session is not None
    now[0] = LINK_LIFE_S
    assert logins.redeem(late) is None
    assert logins.admits(session)
    now[0] = 13 * 3600.0
    assert not logins.admits(session)
    first = logins.invite()
    codes = [logins.invite() for _ in range(64)]
    assert logins.redeem(first) is None
    assert logins.redeem(codes[0]) is not None
    assert logins.void() == 64
    assert logins.redeem(codes[1]) is None


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("who", ["nobody", "a reader", "an empty token"])
def test_nothing_that_changes_the_run_is_open(front: Front, path: str, who: str) -> None:
    headers = {"nobody": {}, "a reader": log_in(front), "an empty token": bearer_of("")}[who]
    front.audited.clear()
    answer = front.client.post(f"/{path}", headers=headers, json={"node": "n0-vm"})
    assert answer.status_code == 401
    assert not front.events
    assert [(line.allowed, line.why) for line in front.audited] == [(False, "wrong token")]


def test_the_operator_may_change_the_run_and_each_time_is_written_down(front: Front) -> None:
    client = front.client
    assert client.post("/stop", headers=OPERATOR).status_code == 202
    assert client.post("/morph", headers=OPERATOR, json={}).status_code == 202
    assert client.post("/drain", headers=OPERATOR, json={"node": "n0-vm"}).status_code == 202
    assert client.post("/tokens", headers=OPERATOR, json={"uses": 5, "life_s": 60}).json() == {"join": "varuna://5-60"}
    assert client.post("/checkpoint", headers=OPERATOR).status_code == 202
    assert [type(event) for event in front.events] == [FinishRequested, MorphRequested, DrainRequested, SaveRequested]
    for front.checkpoints, front.rescues in ((None, False), ("/runs/a/rescue", True)):
        refused = client.post("/checkpoint", headers=OPERATOR)
        assert (refused.status_code, "checkpoints=" in refused.json()["error"]) == (409, True)
    assert [line.action for line in front.audited if line.allowed] == [
        "stop the run",
        "morph",
        "drain a node",
        "mint a join token",
        "save a checkpoint",
    ]


def test_bad_requests_are_told_what_is_wrong_with_them(front: Front) -> None:
    client = front.client
    front.is_busy = True
    busy = client.post("/stop", headers=OPERATOR)
    assert (busy.status_code, "Try again" in busy.json()["error"]) == (503, True)
    front.events.clear()
    unknown = client.post("/drain", headers=OPERATOR, json={"node": "n7"})
    assert (unknown.status_code, "n0-vm" in unknown.json()["error"]) == (404, True)
    assert client.post("/drain", headers=OPERATOR, content=b"\xff{").status_code == 422
    assert client.post("/drain", headers=OPERATOR, content=b"x" * 5000).status_code == 413
    assert client.post("/tokens", headers=OPERATOR, json={"uses": 0}).status_code == 422
    assert client.post("/stop", headers=OPERATOR, json={"now": True}).status_code == 422
    assert client.get("/stop", headers=OPERATOR).status_code == 405
    assert not front.events


def test_logs_can_be_read_from_anywhere_but_only_logs(front: Front) -> None:
    client = front.client
    assert client.get("/logs/n0-vm.0").status_code == 401
    assert client.get("/logs/n0-vm.0", headers=OPERATOR).content == b"one\ntwo\n"
    tail = client.get("/logs/n0-vm.0?offset=-4", headers=OPERATOR)
    assert (tail.content, tail.headers["x-varuna-next-offset"]) == (b"two\n", "8")
    assert client.get("/logs/n0-vm.0?offset=99", headers=OPERATOR).content == b""
    assert client.get("/logs/n0-vm.9", headers=OPERATOR).status_code == 404
    assert client.get("/logs/n0-vm.0?offset=x", headers=OPERATOR).status_code == 422
    for name in ("..%2Fsecret", "..%2f..%2fetc%2fpasswd", ".", "%00"):
        assert client.get(f"/logs/{name}", headers=OPERATOR).status_code in (404, 422)


def test_a_flood_of_refusals_is_a_few_lines(front: Front) -> None:
    for _ in range(100):
        front.client.post("/stop")
    assert len(front.audited) == 1
    front.now_s += 11
    front.client.post("/stop")
    assert "99 more times" in front.audited[-1].why


@settings(max_examples=by_depth(10, 60), deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD"]),
    path=st.one_of(st.sampled_from(["/", "/status", "/logs/n0-vm.0", *(f"/{name}" for name in CHANGES)]), st.text()),
    token=st.one_of(st.sampled_from(["operator-token", "page-token", ""]), st.text(st.characters(codec="latin-1"))),
    body=st.one_of(st.binary(max_size=6000), st.from_regex(rb'\{"(node|uses|life_s)": ?[-0-9a-z".\[{]{0,20}\}')),
    query=st.dictionaries(st.sampled_from(["token", "offset", "x"]), st.text(max_size=20), max_size=2),
)
def test_no_request_breaks_the_door_or_opens_it(
    folder: Path, method: str, path: str, token: str, body: bytes, query: dict[str, Any]
) -> None:
    front = Front(folder)
    with front.client as client:
        try:
            headers = {b"authorization": f"Bearer {token}".encode("latin-1")}
            answer = client.request(method, path, params=query, content=body, headers=headers)
        except Exception as error:
            if type(error).__module__.startswith("httpx"):
                return  # the client itself refuses to send it
            raise
    assert answer.status_code < 500
    if token.strip() != "operator-token":
        assert not front.events


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def wait() -> None:
        silent: Any = asyncio.Event().wait
        with pytest.raises(HTTPException, match=r"did not come within 0\.02 s") as refused:
            await requests.read_body(Request({"type": "http"}, silent), 100, bound_s=0.02)
        assert refused.value.status_code == 408

    asyncio.run(wait())


def test_every_credential_can_be_void_at_once(front: Front) -> None:
    def post(path: str, **body: object) -> tuple[int, dict[str, object]]:
        answer = front.client.post(path, headers=OPERATOR, json=body)
        said: dict[str, object] = answer.json()
        return answer.status_code, said

    assert post("/tokens/void") == (200, {"void": 3})
    assert post("/drain", node="n0-vm", now=True) == (202, {"accepted": "send away", "node": "n0-vm"})
    assert post("/drain", node="n1-away")[0] == 202  # its agent is away: there is no state to move
    assert post("/drain", node="n2-never")[0] == 404
    assert (front.sent_away, front.events) == (["n0-vm", "n1-away", "n2-never"], [])
    assert {line.action for line in front.audited if line.allowed} == {"void all join tokens", "drain a node"}
