"""Trust over real TLS: pinned, named, in time; and what people read when it is somebody else."""

import asyncio
import datetime
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from varuna.core.errors import FleetError
from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
from varuna.fleet.agent.join import admit
from varuna.fleet.net.ca import SERVER_NAME, CertificateAuthority, client_context, issue, open_authority
from varuna.fleet.net.client import ManagerRemote, UnreachableError, fetch_certificate
from varuna.fleet.net.connection_limits import ConnectionLimits
from varuna.fleet.net.join_string import JoinString
from varuna.fleet.net.protocol import Identity
from varuna.fleet.net.serving import Serving

pytestmark = pytest.mark.timeout(20)


async def listen(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.receive()


def serve(authority: CertificateAuthority | None, limits: ConnectionLimits | None = None) -> Serving:
    app = Starlette(
        routes=[
            Route("/ca", lambda request: PlainTextResponse(authority.certificate_pem if authority else "none")),
            WebSocketRoute("/listen", listen),
        ]
    )
    tls = authority.server_context() if authority else None
    serving = Serving(port=0, max_frame_bytes=1000, tls=tls, limits=limits)
    serving.start(app)
    return serving


@dataclass
class Place:
    authority: CertificateAuthority
    folder: Path
    port: int

    def invitation(self, **changes: object) -> JoinString:
        values = {"host": "127.0.0.1", "port": self.port, "fingerprint": self.authority.fingerprint, "token": "t" * 20}
        return JoinString.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("tls")
    authority = open_authority(folder)
    serving = serve(authority)
    yield Place(authority, folder, serving.port)
    serving.stop()


def test_the_certificate_behind_a_join_string_is_fetched_and_then_trusted(place: Place) -> None:
    pem = fetch_certificate(place.invitation())
    assert ManagerRemote("127.0.0.1", place.port, pem).get("/ca").body.decode() == pem
    assert open_authority(place.folder).fingerprint == place.authority.fingerprint  # a manager that starts again
    assert not any(path.stat().st_mode & 0o077 for path in place.folder.iterdir())


def test_another_fingerprint_is_refused_before_any_token_is_sent(place: Place) -> None:
    with pytest.raises(FleetError, match=r"not the one that this JOIN string was made for.*impersonating it"):
        fetch_certificate(place.invitation(fingerprint="ab" * 32))


@pytest.mark.parametrize("real_first", [True, False])
def test_a_bundle_with_the_right_fingerprint_makes_nobody_else_trusted(tmp_path: Path, real_first: bool) -> None:
    """Python's base64 ends at the padding, so that more certificates may follow the one that was compared."""
    real, impostor = _padded(tmp_path / "real"), _padded(tmp_path / "impostor")
    texts = [real.certificate_pem, impostor.certificate_pem]
    bundle = "".join(texts if real_first else reversed(texts))
    serving = serve(CertificateAuthority(bundle, impostor.server_pem))  # the impostor listens, and shows both
    try:
        invitation = Place(real, tmp_path, serving.port).invitation()
        with pytest.raises(FleetError, match=r"not this run's manager|not the one that this JOIN string"):
            admit(invitation, AgentFolder(tmp_path / "home"))
        assert AgentFolder(tmp_path / "home").read() is None  # no token was spent, and nothing was stored
        card = AgentIdentity(
            identity=Identity(node="n0", secret="s"), certificate_pem=bundle, fingerprint=invitation.fingerprint
        )
        AgentFolder(tmp_path / "home").write(card)  # as a version before this one left it
        with pytest.raises(FleetError, match=r"not this run's manager|is damaged"):
            ManagerRemote("127.0.0.1", serving.port, _pem_kept_in(tmp_path / "home")).get("/ca")
        with pytest.raises(FleetError, match="not this run's manager"):  # nor does a bundle name more than one
            ManagerRemote("127.0.0.1", serving.port, "".join(texts)).get("/ca")
    finally:
        serving.stop()


def _pem_kept_in(folder: Path) -> str:
    card = AgentFolder(folder).read()
    assert card is not None
    return card.certificate_pem


def _padded(folder: Path) -> CertificateAuthority:
    """An authority whose certificate ends with padding, as two of three do."""
    for number in range(100):
        made = open_authority(folder / str(number))
        if len(ssl.PEM_cert_to_DER_cert(made.certificate_pem)) % 3:
            return made
    raise AssertionError("none in a hundred")


def test_another_run_at_the_same_address_is_not_trusted(place: Place, tmp_path: Path) -> None:
    other = open_authority(tmp_path)
    with pytest.raises(FleetError, match=r"not this run's manager.*Check the address"):
        ManagerRemote("127.0.0.1", place.port, other.certificate_pem).get("/ca")


@pytest.mark.parametrize(
    ("shift", "said"), [(datetime.timedelta(hours=-1), "has expired, or this machine's clock is wrong")]
)
def test_an_expired_certificate_is_named_as_such(tmp_path: Path, shift: datetime.timedelta, said: str) -> None:
    authority = open_authority(tmp_path)
    key = serialization.load_pem_private_key((tmp_path / "ca-key.pem").read_bytes(), None)
    issue(key, x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes()), authority.server_pem, life=shift)  # type: ignore[arg-type]  # it is an EC key
    serving = serve(authority)
    try:
        with pytest.raises(FleetError, match=said):
            ManagerRemote("127.0.0.1", serving.port, authority.certificate_pem).get("/ca")
    finally:
        serving.stop()


def test_older_tls_is_not_spoken(place: Place) -> None:
    context = client_context(place.authority.certificate_pem)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", place.port), 5) as raw, pytest.raises(ssl.SSLError):
        context.wrap_socket(raw, server_hostname=SERVER_NAME)


def test_wrong_addresses_say_what_is_there_instead(place: Place) -> None:
    plain = serve(None)
    try:
        with pytest.raises(FleetError, match=r"does not speak TLS|not a Varuna manager"):
            fetch_certificate(place.invitation(port=plain.port))
        with pytest.raises(FleetError, match="closed the connection without an answer"):
            ManagerRemote("127.0.0.1", place.port, None).get("/ca")
    finally:
        plain.stop()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(UnreachableError, match="Is it running"):
            fetch_certificate(place.invitation(port=unused.getsockname()[1]))


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"no handshake at all"])
def test_who_does_not_end_a_handshake_is_dropped(place: Place, said: bytes) -> None:
    serving = serve(place.authority, ConnectionLimits(request_s=60.0 if said else 0.2, handshake_s=0.2))
    try:
        with socket.create_connection(("127.0.0.1", serving.port), 5) as silent:
            silent.sendall(said)
            while silent.recv(100):
                pass
    finally:
        serving.stop()


def test_the_server_stops_while_websockets_are_open(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    serving = serve(place.authority)
    context = client_context(place.authority.certificate_pem)

    async def stop_meanwhile() -> float:
        # One thread for one TLS connection: with two, Python 3.11 now and then hangs in the handshake.
        url = f"wss://127.0.0.1:{serving.port}/listen"
        async with connect(url, ssl=context, server_hostname=SERVER_NAME, proxy=None, close_timeout=1) as websocket:
            assert await asyncio.wait_for(websocket.recv(), 5) == "hello"
            begin_s = time.monotonic()
            await asyncio.to_thread(serving.stop)
            return time.monotonic() - begin_s

    assert asyncio.run(stop_meanwhile()) < 4
    assert "Traceback" not in capfd.readouterr().err


def test_an_answer_that_drips_has_a_bound_as_a_whole() -> None:
    """Each read has one of its own, which a drop now and then satisfies for ever."""

    async def drip(request: Request) -> StreamingResponse:
        async def drops() -> AsyncIterator[bytes]:
            while True:
                yield b"."
                await asyncio.sleep(0.01)

        return StreamingResponse(drops())

    serving = Serving(port=0, max_frame_bytes=1000)
    serving.start(Starlette(routes=[Route("/drip", drip)]))
    try:
        with pytest.raises(UnreachableError, match="did not answer within"):
            ManagerRemote("127.0.0.1", serving.port, None, answer_s=0.2).get("/drip")
    finally:
        serving.stop()
