"""Keys for random streams: stable across processes, machines and Python versions."""

import hashlib


def derive_key(*parts: int | str) -> int:
    """Hash ``parts`` to an unsigned 64-bit key; different sequences of parts give independent keys.

    Each part goes in with its type and length, so that ``("ab", "c")``, ``("a", "bc")`` and ``("a", "b", "c")``
    differ, and so do ``1`` and ``"1"``.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = (part if isinstance(part, str) else str(int(part))).encode()
        digest.update(b"%c%d:%b" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest(), "little")
