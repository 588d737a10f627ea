"""Members of a generation prove to each other that they belong to it, before anything else goes over their links.

A program that hears what members say to the store can connect as one of them. The manager gives a secret to each
generation's members alone; over each pair's own link both send a nonce, and answer the other's with a keyed hash of it.
That keeps strangers out, and processes of another run or another generation; it hides nothing from who listens.
"""

import hmac
import secrets

import torch

from varuna.engine.base.transport import Group

PROOF_BOUND_S = 30.0
_BYTES = 32


def prove(group: Group, *, secret: str, name: str, rank: int, bound_s: float = PROOF_BOUND_S) -> None:
    """Block until all members of a group, this one included, have proven that they know the secret.

    Args:
        group: just made.
        secret: of the generation.
        name: of the group, unique in the run.
        rank: of this member in the group.
        bound_s: for each of two exchanges.

    Raises:
        RuntimeError: a member cannot prove it, or says nothing for ``bound_s``.
    """
    mine = secrets.token_bytes(_BYTES * group.size)
    theirs = _exchange(group, mine, bound_s)
    proofs = b"".join(
        _proof(secret, name, rank, peer, _part(theirs, peer), _part(mine, peer)) for peer in range(group.size)
    )
    shown = _exchange(group, proofs, bound_s)
    for peer in range(group.size):
        expected = _proof(secret, name, peer, rank, _part(mine, peer), _part(theirs, peer))
        if not hmac.compare_digest(expected, _part(shown, peer)):
            raise RuntimeError(
                f"the process that answers as member {peer} of {name} has not proven that it belongs there: "
                "another run, or a stranger, can reach the links between workers. Use a private --interface"
            )


def _proof(secret: str, name: str, prover: int, asker: int, asked: bytes, own: bytes) -> bytes:
    # Names both ends and both nonces: a proof cannot be sent back to its maker, nor used with another member.
    text = f"{name}/{prover}/{asker}/".encode() + asked + own
    return hmac.digest(bytes.fromhex(secret), text, "sha256")


def _part(whole: bytes, index: int) -> bytes:
    return whole[_BYTES * index : _BYTES * (index + 1)]


def _exchange(group: Group, parts: bytes, bound_s: float) -> bytes:
    return bytes(group.exchange(torch.tensor(list(parts), dtype=torch.uint8), bound_s).tolist())
