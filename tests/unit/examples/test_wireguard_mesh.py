"""examples/wireguard/mesh.py: what wg-quick is given."""

import base64
import configparser
import importlib.util
import ipaddress
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

SCRIPT = Path(__file__).parents[3] / "examples" / "wireguard" / "mesh.py"
NETWORK = ipaddress.IPv4Network("10.77.0.0/24")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mesh", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mesh", module)
    spec.loader.exec_module(module)
    return module


def _sections(text: str) -> list[configparser.SectionProxy]:
    """WireGuard's files repeat section names."""
    found = []
    for part in text.split("[")[1:]:
        parser = configparser.ConfigParser()
        parser.read_string("[" + part.partition("#")[0])
        found.append(parser[parser.sections()[0]])
    return found


def test_every_host_knows_the_key_and_the_address_of_every_other(script: ModuleType) -> None:
    texts = script.mesh({"a": "192.0.2.1", "b": "192.0.2.2", "c": ""}, NETWORK, 51820)
    own = {}
    for name, text in texts.items():
        interface, *_ = _sections(text)
        private = X25519PrivateKey.from_private_bytes(base64.b64decode(interface["PrivateKey"]))
        public = base64.b64encode(private.public_key().public_bytes_raw()).decode()
        own[name] = (public, interface["Address"].partition("/")[0])
    for name, text in texts.items():
        _, *peers = _sections(text)
        assert {(peer["PublicKey"], peer["AllowedIPs"].removesuffix("/32")) for peer in peers} == {
            own[other] for other in own if other != name
        }
    endpoints = [peer.get("Endpoint") for peer in _sections(texts["a"])[1:]]
    assert endpoints == ["192.0.2.2:51820", None]


def test_two_hosts_without_an_address_are_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="cannot reach each other"):
        script.mesh({"a": "192.0.2.1", "b": "", "c": ""}, NETWORK, 51820)


def test_files_with_keys_are_for_their_owner_only(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mesh.py", "--out", str(tmp_path / "mesh"), "a=192.0.2.1", "b=192.0.2.2"])
    assert script.main() == 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "mesh").iterdir()} == {0o600}
