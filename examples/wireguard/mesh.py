"""Write a WireGuard configuration for each host of a run: a full mesh, so that tensors are encrypted from host to host.

    python mesh.py --out mesh vm0=10.0.0.10 vm1=10.0.0.11 vm2=198.51.100.7

writes ``mesh/vm0.conf`` and so on, for ``wg-quick up``. The first host gets 10.77.0.1, the next 10.77.0.2. Hosts
without an address (``vm3=``) may be behind NAT: they call the others, which must have addresses. See
docs/cluster.md, section Encrypt the tensors.
"""

import base64
import ipaddress
import os
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

KEEPALIVE_S = 25
"""Shorter than any NAT forgets a flow."""


@dataclass(frozen=True)
class Host:
    """One member of the mesh."""

    name: str
    endpoint: str
    """address that the others can reach, without the port; empty if they cannot"""
    inside: ipaddress.IPv4Address
    """address within the mesh"""
    private_key: str
    public_key: str


def make_host(name: str, endpoint: str, inside: ipaddress.IPv4Address) -> Host:
    """Make a host with a new key pair (Curve25519, in WireGuard's base64)."""
    key = X25519PrivateKey.generate()
    private = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return Host(name, endpoint, inside, base64.b64encode(private).decode(), base64.b64encode(public).decode())


def configuration(host: Host, others: list[Host], network: ipaddress.IPv4Network, port: int) -> str:
    """Return the file that ``wg-quick`` reads on ``host``."""
    lines = [
        "[Interface]",
        f"PrivateKey = {host.private_key}",
        f"Address = {host.inside}/{network.prefixlen}",
        f"ListenPort = {port}",
    ]
    for other in others:
        lines += ["", f"# {other.name}", "[Peer]", f"PublicKey = {other.public_key}", f"AllowedIPs = {other.inside}/32"]
        if other.endpoint:
            lines += [f"Endpoint = {other.endpoint}:{port}", f"PersistentKeepalive = {KEEPALIVE_S}"]
    return "\n".join(lines) + "\n"


def mesh(named: dict[str, str], network: ipaddress.IPv4Network, port: int) -> dict[str, str]:
    """Return host name -> configuration.

    Args:
        named: host name -> address that the others can reach; empty for a host that only calls.
        network: the mesh's own addresses.
        port: UDP port on every host.

    Raises:
        ValueError: more hosts than addresses, or two that cannot reach each other.
    """
    if len(named) > network.num_addresses - 2:
        raise ValueError(f"{network} has room for {network.num_addresses - 2} hosts, but {len(named)} were named")
    silent = [name for name, endpoint in named.items() if not endpoint]
    if len(silent) > 1:
        raise ValueError(
            f"{', '.join(silent)} have no address, so they cannot reach each other. Give all hosts but one an address, "
            "or use a coordinated network (docs/cluster.md, section Encrypt the tensors)."
        )
    addresses = network.hosts()
    hosts = [make_host(name, endpoint, next(addresses)) for name, endpoint in named.items()]
    return {host.name: configuration(host, [h for h in hosts if h is not host], network, port) for host in hosts}


def main() -> int:
    """Write the files, each readable by its owner only."""
    parser = ArgumentParser(description="Write a WireGuard configuration for each host: a full mesh.")
    parser.add_argument("hosts", nargs="+", metavar="NAME=ADDRESS")
    parser.add_argument("--out", type=Path, default=Path("mesh"))
    parser.add_argument("--network", type=ipaddress.IPv4Network, default=ipaddress.IPv4Network("10.77.0.0/24"))
    parser.add_argument("--port", type=int, default=51820)
    args = parser.parse_args()
    named = dict(host.partition("=")[::2] for host in args.hosts)
    try:
        if len(named) < len(args.hosts) or not all(named):
            raise ValueError("each host needs a name of its own: NAME=ADDRESS")
        texts = mesh(named, args.network, args.port)
    except ValueError as error:
        print(f"mesh.py: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in texts.items():
        path = args.out / f"{name}.conf"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
