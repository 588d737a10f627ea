"""An immutable mapping that is cheap to change: a copy shares all but a few small pieces with the original. Pure.

It is a trie over the hashes of its keys, 32 ways at each branch::

    branch, a tuple of 32 ── branch ── leaf {key: (number, value)}    a leaf splits when it has more than 32 keys

So a change copies one leaf and the few branches above it, however many keys there are.
"""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")

_BITS, _WAYS = 5, 32
_DEEPEST = 12  # 60 bits: keys whose hashes are equal share a leaf
_Leaf = dict[str, tuple[int, V]]
_Node = tuple["_Node[V]", ...] | _Leaf[V]


class PersistentMap(Mapping[str, V], Generic[V]):
    """A mapping from text to values, in the order in which the keys were first put in.

    Looking up and changing take a time that grows with the logarithm of the size, to the base 32. The first iteration
    after a key was added or removed sorts all keys; later ones, also over copies with the same keys, do not.
    """

    __slots__ = ("_count", "_next", "_order", "_root")

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._root: _Node[V] = {}
        self._count, self._next = 0, 0
        self._order: list[tuple[str, ...]] = []  # shared by all copies with the same keys: at most one, once sorted
        if items:
            leaf = {key: (number, items[key]) for number, key in enumerate(items)}
            self._root = _split(leaf, 0) if len(leaf) > _WAYS else leaf
            self._count = self._next = len(leaf)
            self._order.append(tuple(items))

    def __getitem__(self, key: str) -> V:
        node, bits = self._root, hash(key)
        while type(node) is tuple:
            node = node[bits & 31]
            bits >>= _BITS
        return node[key][1]  # type: ignore[call-overload]

    def __contains__(self, key: object) -> bool:
        node, bits = self._root, hash(key)
        while type(node) is tuple:
            node = node[bits & 31]
            bits >>= _BITS
        return key in node

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        if not self._order:
            numbered = [(number, key) for leaf in _leaves(self._root) for key, (number, _) in leaf.items()]
            self._order.append(tuple(key for _, key in sorted(numbered)))
        return iter(self._order[0])

    def with_item(self, key: str, value: V) -> "PersistentMap[V]":
        """A copy in which ``key`` has this value; a key that was there keeps its place."""
        made: PersistentMap[V] = PersistentMap.__new__(PersistentMap)
        made._root, is_new = _put(self._root, hash(key), 0, key, value, self._next)
        made._count, made._next = self._count + is_new, self._next + is_new
        made._order = [] if is_new else self._order
        return made

    def with_values(self, values: Mapping[str, V]) -> "PersistentMap[V]":
        """A copy in which these keys, which must be there, have other values; quicker than one after the other."""
        made: PersistentMap[V] = PersistentMap.__new__(PersistentMap)
        made._root = _replace(self._root, [(hash(key), key) for key in values], values) if values else self._root
        made._count, made._next, made._order = self._count, self._next, self._order
        return made

    def without(self, key: str) -> "PersistentMap[V]":
        """A copy without ``key``, which must be there."""
        made: PersistentMap[V] = PersistentMap.__new__(PersistentMap)
        made._root = _drop(self._root, hash(key), key)
        made._count, made._next, made._order = self._count - 1, self._next, []
        return made

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"


def _put(node: _Node[V], bits: int, depth: int, key: str, value: V, number: int) -> tuple[_Node[V], bool]:
    """The node with one more item, and whether its key is new; ``bits`` are those of the hash left at this depth."""
    if isinstance(node, tuple):
        way = bits & 31
        child, is_new = _put(node[way], bits >> _BITS, depth + 1, key, value, number)
        return (*node[:way], child, *node[way + 1 :]), is_new
    known = node.get(key)
    leaf = node.copy()
    leaf[key] = (number if known is None else known[0], value)
    if len(leaf) > _WAYS and depth < _DEEPEST:
        return _split(leaf, depth), known is None
    return leaf, known is None


def _replace(node: _Node[V], keys: list[tuple[int, str]], values: Mapping[str, V]) -> _Node[V]:
    """The node with other values of these keys, of which each comes with the bits of its hash left at this depth."""
    if isinstance(node, tuple):
        ways: dict[int, list[tuple[int, str]]] = {}
        for bits, key in keys:
            ways.setdefault(bits & 31, []).append((bits >> _BITS, key))
        children = list(node)
        for way, under in ways.items():
            children[way] = _replace(node[way], under, values)
        return tuple(children)
    leaf = node.copy()
    for _, key in keys:
        leaf[key] = leaf[key][0], values[key]
    return leaf


def _drop(node: _Node[V], bits: int, key: str) -> _Node[V]:
    if isinstance(node, tuple):
        way = bits & 31
        return (*node[:way], _drop(node[way], bits >> _BITS, key), *node[way + 1 :])
    leaf = node.copy()
    del leaf[key]
    return leaf


def _split(leaf: _Leaf[V], depth: int) -> _Node[V]:
    """A branch over leaves, for a leaf that has become too large."""
    ways: list[_Leaf[V]] = [{} for _ in range(_WAYS)]
    for key, entry in leaf.items():
        ways[hash(key) >> _BITS * depth & 31][key] = entry
    return tuple(_split(way, depth + 1) if len(way) > _WAYS and depth + 1 < _DEEPEST else way for way in ways)


def _leaves(node: _Node[V]) -> Iterator[_Leaf[V]]:
    if isinstance(node, tuple):
        for child in node:
            yield from _leaves(child)
    else:
        yield node
