"""Gradients of tied parameters, summed over the sections that use them."""

from collections.abc import Mapping

from torch import Tensor

from varuna.engine.stage.sums import Sums


class TiedTotals:
    """The totals of one stage, which its optimizer gets in place of the sums of its first section that uses each.

    If sums may outlast a loss, a total is kept apart until the update: from the sum of its own section, another worker
    can go on until then.
    """

    def __init__(self, views: Mapping[str, Tensor], sums: Sums) -> None:
        """Begin without any.

        Args:
            views: by parameter, where the optimizer finds its gradient: in a section's bucket.
            sums: of the stage.
        """
        self.views, self._sums = views, sums
        self._apart: dict[str, Tensor] = {}

    def take(self, name: str, total: Tensor) -> None:
        """A total is known; its memory is taken over.

        Raises:
            RuntimeError: the generation has ended.
        """
        with self._sums.changing():
            if self._sums.outlast:
                self._apart[name] = total
            else:
                self.views[name].copy_(total)

    @property
    def known(self) -> Mapping[str, Tensor]:
        """By parameter, once all are known."""
        return {**self.views, **self._apart}

    def settle(self) -> None:
        """Put them where the optimizer finds them; nobody goes on from the sums any more."""
        for name, total in self._apart.items():
            self.views[name].copy_(total)
        self._apart = {}
