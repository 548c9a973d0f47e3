"""Fields of requests: one table per route says what is honoured, a label, or rejected.

The same table checks a request, makes /openapi.json and the page of the docs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rooflax.errors import did_you_mean
from rooflax.server.errors import ApiError

Policy = Literal["honoured", "label", "rejected"]


@dataclass(frozen=True)
class Field:
    """A field of a JSON object.

    Attributes:
        type: of a value as msgspec knows it, or a `FieldTable`, or a list of one `FieldTable`.
        text: what it does; of a rejected field, why.
        policy: a label changes no token and is accepted; "rejected" is an error.
        harmless: values of a rejected field that mean what happens anyway.
        required: the object must have it.
    """

    name: str
    type: Any
    text: str
    policy: Policy = "honoured"
    harmless: tuple[Any, ...] = ()
    required: bool = False


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """An object without its nulls, which mean that a field is left out."""
    return {name: value for name, value in fields.items() if value is not None}


class FieldTable:
    """The fields of an object, by name.

    Args:
        passes_others: fields that are not known are labels, not errors.
    """

    def __init__(self, *fields: Field, passes_others: bool = False):
        self.fields: dict[str, Field] = {field.name: field for field in fields}
        self._passes_others = passes_others

    def parse(
        self, body: Any, where: str = "", *, ignored: list[str] | None = None
    ) -> dict[str, Any]:
        """An object's honoured fields, checked; null counts as absent.

        Args:
            where: of the object in the body, as in `messages[0]`.
            ignored: receives the names of unknown fields, which else are errors.

        Raises:
            ApiError: with the field.
        """
        if not isinstance(body, Mapping):
            raise ApiError(
                f"{where or 'The body'} is {body!r:.60}; it must be a JSON object.",
                param=where or None,
            )
        values = {}
        for name, value in present(body).items():
            path = f"{where}.{name}" if where else name
            field = self.fields.get(name)
            if field is None:
                if not self._passes_others:
                    _unknown(path, name, self.fields, ignored)
            else:
                read = _read(field, path, value, ignored)
                if field.policy == "honoured":
                    values[name] = read
        for field in self.fields.values():
            if field.required and field.name not in values:
                path = f"{where}.{field.name}" if where else field.name
                raise ApiError(f"{path} is missing ({field.text}).", param=path)
        return values

    def schema(self) -> dict[str, Any]:
        """As JSON Schema; rejected fields are left out."""
        fields = [field for field in self.fields.values() if field.policy != "rejected"]
        return {
            "type": "object",
            "properties": {field.name: _schema(field) for field in fields},
            "required": [field.name for field in fields if field.required],
            "additionalProperties": self._passes_others,
        }


def _unknown(path: str, name: str, known: Mapping[str, Field], ignored: list[str] | None) -> None:
    if ignored is None:
        meant = did_you_mean(name, known)
        raise ApiError(
            f"There is no field {path[:80]!r}{meant}; drop it.",
            code="unknown_parameter",
            param=path[:80],
        )
    ignored.append(path[:80])


def _read(field: Field, path: str, value: Any, ignored: list[str] | None) -> Any:
    if field.policy == "rejected":
        if not any(value == same and type(value) is type(same) for same in field.harmless):
            raise ApiError(
                f"{path} is not supported: {field.text}.", code="unsupported_value", param=path
            )
        return None
    if isinstance(field.type, FieldTable):
        return field.type.parse(value, path, ignored=ignored)
    if isinstance(field.type, list):
        if not isinstance(value, list):
            raise ApiError(f"{path} is {value!r:.60}; it must be a list.", param=path)
        return [
            field.type[0].parse(item, f"{path}[{index}]", ignored=ignored)
            for index, item in enumerate(value)
        ]
    return convert(value, field.type, path)


def convert(value: Any, kind: Any, path: str) -> Any:
    """A value as a type of msgspec.

    Raises:
        ApiError: it is none; the place is the error's `param`.
    """
    try:
        return msgspec.convert(value, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
        inner = place.partition("`")[0]
        path += inner[1:] if inner.startswith("$") else ""
        wanted = message[:1].lower() + message[1:]
        raise ApiError(f"{path} is wrong: {wanted.replace('`', '')}.", param=path) from None


def one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """
    Raises:
        ApiError: the value is none of those known.
    """
    if value not in known:
        raise ApiError(
            f"{name} is {value!r:.60}; it must be one of {', '.join(known)}.",
            code="unsupported_value",
            param=name,
        )


def _schema(field: Field) -> dict[str, Any]:
    if isinstance(field.type, FieldTable):
        schema = field.type.schema()
    elif isinstance(field.type, list):
        schema = {"type": "array", "items": field.type[0].schema()}
    else:
        schema = msgspec.json.schema(field.type)
    if "pattern" in schema:  # in JSON Schema's regexes $ is the very end, and \Z is not known
        schema["pattern"] = schema["pattern"].replace(r"\Z", "$")
    return {**schema, "description": field.text}
