"""The exchange by which members of a generation find each other: the manager passes offers to those who seek. Pure.

Offers go over connections that are authenticated already: worker, agent, TLS, manager. A manager that starts again
has forgotten them; members then offer again what they have, while they seek in vain.
"""

from collections.abc import Sequence

from varuna.core.messages import Found, Offered, Sought

_BYTES_A_MEMBER = 64 * 2**10
_KEYS_A_MEMBER = 64


class Meeting:
    """The exchange of keys among members of the newest generation; for one thread."""

    def __init__(self) -> None:
        self._generation = -1
        self._members: frozenset[str] = frozenset()
        self._offers: dict[str, tuple[str, bytes]] = {}  # by key: whose, and what
        self._offered_bytes: dict[str, int] = {}  # by member, keys included
        self._seekers: dict[str, list[str]] = {}
        self._seeking: dict[str, int] = {}  # keys that nobody has offered yet, by member

    def begin_generation(self, generation: int, members: Sequence[str]) -> None:
        """Forget what was offered in the generations before."""
        self._generation, self._members = generation, frozenset(members)
        self._offers, self._offered_bytes, self._seekers, self._seeking = {}, {}, {}, {}

    def answer_worker(self, worker: str, message: Offered | Sought) -> list[tuple[str, Found]]:
        """Take what a worker offers or seeks; return whom to tell what. Workers that are not members now are ignored.

        Raises:
            ValueError: a member offers or seeks more than any needs, or in another one's place.
        """
        if message.generation != self._generation or worker not in self._members:
            return []
        return self._offer(worker, message) if isinstance(message, Offered) else self._seek(worker, message.keys)

    def _offer(self, worker: str, offer: Offered) -> list[tuple[str, Found]]:
        owner, old = self._offers.get(offer.key, (worker, None))
        if owner != worker:
            raise ValueError(f"it offers {offer.key!r}, which is another one's")
        size = self._offered_bytes.get(worker, 0) + len(offer.value)
        size += len(offer.key) if old is None else -len(old)
        if size > _BYTES_A_MEMBER:
            raise ValueError(f"it offers {size} bytes, more than any member needs")
        self._offered_bytes[worker] = size
        self._offers[offer.key] = worker, offer.value
        seekers = self._seekers.pop(offer.key, [])
        for seeker in seekers:
            self._seeking[seeker] -= 1
        return [(seeker, self._found([offer.key])) for seeker in seekers]

    def _seek(self, worker: str, keys: Sequence[str]) -> list[tuple[str, Found]]:
        there = [key for key in keys if key in self._offers]
        for key in keys:
            if key in self._offers or worker in self._seekers.get(key, []):
                continue
            seeking = self._seeking.get(worker, 0) + 1
            if seeking > _KEYS_A_MEMBER + 8 * len(self._members):  # all others, in each of a few groups
                raise ValueError(f"it seeks {seeking} keys that nobody has, more than any member needs")
            self._seeking[worker] = seeking
            self._seekers.setdefault(key, []).append(worker)
        return [(worker, self._found(there))] if there else []

    def _found(self, keys: Sequence[str]) -> Found:
        return Found(generation=self._generation, values={key: self._offers[key][1] for key in keys})
