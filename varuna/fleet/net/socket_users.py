"""The user of this machine at the other end of a connection, as Linux says (``NETLINK_SOCK_DIAG``)."""

import ipaddress
import socket
import struct

_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_QUESTION = struct.Struct("=BBBxI")  # struct inet_diag_req_v2: family, protocol, extensions, states
_SOCKET = struct.Struct("!HH16s16s12s")  # struct inet_diag_sockid: ports, addresses, interface and cookie
_ANSWER = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: user and inode
_ANY_INTERFACE_AND_COOKIE = b"\0" * 4 + b"\xff" * 8

Address = tuple[str, int]
"""A host's address and a port."""


def user_of(peer: Address, own: Address) -> int | None:
    """The user whose process has the other end of a connection; one look-up of the kernel's, which waits for nobody.

    Args:
        peer: of the other end.
        own: of this end.

    Returns:
        Its number; None: the other end is on another machine or in another network namespace, nobody has it any more,
        or this system does not say.
    """
    try:
        family, there = _packed(peer[0])
        _, here = _packed(own[0])
        asked = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        asked += _SOCKET.pack(peer[1], own[1], there, here, _ANY_INTERFACE_AND_COOKIE)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # it has answered before ``send`` returns
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 0, 0) + asked)
            answer = kernel.recv(4096)
    except (OSError, ValueError, AttributeError):  # AttributeError: not Linux
        return None
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return user if inode else None  # of a socket that was closed, the kernel does not know the user any more


def _packed(address: str) -> tuple[int, bytes]:
    """Family of an address, and its bytes."""
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    return (socket.AF_INET if found.version == 4 else socket.AF_INET6), found.packed
