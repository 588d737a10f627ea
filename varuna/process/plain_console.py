"""A console that shows what it is given and obeys none of it: most of what we print was said by other machines."""

from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from varuna.core.plain_text import plain


class PlainConsole(Console):
    """Reads no markup in strings, and passes on no control characters; styles are given as ``Text`` or ``style=``.

    Args:
        file: where to write; None: standard output.
        stderr: write to standard error.
        more: further options of ``rich.console.Console``.
    """

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False, **more: Any) -> None:
        super().__init__(file=file, stderr=stderr, markup=False, emoji=False, highlight=False, **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render a renderable as ``Console`` does; the control codes in it are those of ``rich`` alone."""
        return self._cleaned(super().render(renderable, options))

    def _cleaned(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        for segment in segments:
            yield segment if segment.control else segment._replace(text=plain(segment.text))
