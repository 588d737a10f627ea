"""The base of every shared value: frozen, checked, and the same in memory, on disk and on the wire."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen value that refuses unknown fields; NaN, infinities and bytes (base64) survive its JSON form."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        ser_json_bytes="base64",
        val_json_bytes="base64",
        protected_namespaces=(),
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Make a copy with other values, unchecked.

        Raises:
            AttributeError: there is no such field; pydantic would keep it beside them, unread.
        """
        unknown = set(update or ()) - type(self).model_fields.keys()
        if unknown:
            raise AttributeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return super().model_copy(update=update, deep=deep)
