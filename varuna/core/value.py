"""The base of every shared value: frozen, checked, and the same in memory, on disk and on the wire."""

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """A frozen value that refuses unknown fields; NaN and infinities survive its JSON form."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", protected_namespaces=())
