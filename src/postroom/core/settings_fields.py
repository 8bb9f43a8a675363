"""Settings that a program gives as structs: each field is checked against its declared type.

Rule 1: msgspec checks only what it decodes. `fit_fields` checks what a program makes, from `__post_init__`.
Rule 2: the limits of a field stand in its type. A field whose type has no upper limit may be infinite.
"""

import re
from functools import cache
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import fields, force_setattr

from postroom.calls.fields import DELAY_S_MAX, NUMBER_MAX
from postroom.core.fieldfaults import field_fault
from postroom.errors import InvalidSetting, shown

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=DELAY_S_MAX)]
Kept: TypeAlias = Annotated[float, Meta(gt=0)]
"""Seconds of a retention, which may be infinite."""
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=NUMBER_MAX)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Some: TypeAlias = Annotated[int, Meta(ge=1)]


def fit_fields(settings: msgspec.Struct, *, besides: tuple[str, ...] = ()) -> None:
    """Raise `InvalidSetting` unless every field, besides those named, has its declared type.

    A list becomes a tuple, and an object a struct, where the type says so.
    """
    name, twin = type(settings).__name__, _twin(type(settings), besides)
    try:
        fitted = msgspec.convert(settings, twin, from_attributes=True)
    except msgspec.ValidationError as error:
        fault = field_fault(error, "it", twin)
        given = getattr(settings, re.split(r"[ .\[]", fault)[0], None)
        raise InvalidSetting(f"{name}: {fault}, and it is {shown(given)}") from None
    for field in fields(twin):
        force_setattr(settings, field.name, getattr(fitted, field.name))


@cache
def _twin(kind: type[msgspec.Struct], besides: tuple[str, ...]) -> type[msgspec.Struct]:
    """A struct with the same fields that checks nothing when it is made."""
    return msgspec.defstruct(
        kind.__name__, [(field.name, field.type) for field in fields(kind) if field.name not in besides]
    )
