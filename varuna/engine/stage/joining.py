"""Adjacent sections of a stage that have one graph, so that one call of autograd runs their backwards.

A call costs as much as some operations, and on a GPU a hand-over to another thread and back:

    apart    section 3 -> value | leaf -> section 4 -> value | leaf -> section 5       three calls
    joined   section 3 ---- value ------- section 4 ---- value ------- section 5       one call: 5, then 4, then 3

A gradient has the same bits either way. Autograd runs what was recorded last first, so it is through with section 5
before it begins with 4, and adds up what the operations of 5 say about a value in the order in which it would for a
leaf. Where several sections take a value, it would add up operations instead of sections: such a value is cut off from
what it was made from.
"""

from collections import Counter
from typing import NamedTuple

from varuna.partition.cut.split import Split
from varuna.partition.opaque.calls import holds_opaque


class Link(NamedTuple):
    """A value that a section makes gradients of."""

    name: str
    maker: int
    """the section that makes it"""
    place: int
    """among what that makes"""


class Links(NamedTuple):
    """A section's links to sections before it, whose graph it may continue."""

    earliest: int
    """the first section with which their graph may begin; the section itself: it begins one"""
    taken: tuple[Link, ...]


def links_of(split: Split) -> tuple[Links, ...]:
    """Return, by section, how it may continue the graph of those before it.

    It does unless some value crosses into it that their graph makes, that a gradient comes back for, and that several
    sections take. Sections that run a module eagerly have graphs of their own: the module may look at its leaves.

        section   takes      makes       earliest
        0                    h0          0
        1         h0         h1, bias    0
        2         h1, bias   h2          2           bias is made by 1, and 3 takes it, too: not one graph with 1
        3         h2, bias   h3          2
    """
    made = {name: (section.index, place) for section in split.sections for place, name in enumerate(section.makes)}
    takers = Counter(name for section in split.sections for name in section.takes)
    eager = [holds_opaque(section.module.graph) for section in split.sections]
    found: list[Links] = []
    for section, crossings in zip(split.sections, split.crossings, strict=False):
        index, learning = section.index, {each.name for each in crossings if each.differentiable}
        # Behind its maker, not with it: then the value is a leaf, to which sections add one after the other.
        shared = (made[name][0] + 1 for name in learning if takers[name] > 1)
        is_alone = not index or eager[index] or eager[index - 1]
        earliest = index if is_alone else max(shared, default=0)
        found.append(Links(earliest, tuple(Link(name, *made[name]) for name in section.takes if name in learning)))
    return tuple(found)
