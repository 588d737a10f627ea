"""The base of every shared value: frozen, checked, and the same in memory, on disk and on the wire."""

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
