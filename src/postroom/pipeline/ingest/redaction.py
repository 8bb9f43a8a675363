"""The redaction of the audit stream as columns of Spark.

Rule 1: there is one definition, `core.redaction`. That package needs the standard library alone, so the text
        of its files is sent along with the function that uses it, and executors need no postroom.
Rule 2: a row whose text is NULL or encrypted costs nothing but its place in the batch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.core import redaction
from postroom.core.redaction import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column

ENCRYPTED: Final = "enc:"
PACKAGE: Final = "postroom_redaction"
"""What it is called on an executor."""


def redacted(level: Level) -> "dict[str, Column]":
    """The columns that may say too much, redacted."""
    if level == "none":
        return {}
    payload, error = F.col("payload"), F.col("error")
    readable = F.when(~payload.startswith(ENCRYPTED), payload)
    both = _redact(level, _texts())(readable, error)
    return {
        "payload": F.coalesce(both["payload"], payload),
        "error": F.coalesce(both["error"], error),
    }


def _texts() -> dict[str, str]:
    """The files of the package by their names, each behind those that it imports."""
    folder = Path(redaction.__file__).parent
    return {
        name: (folder / f"{name}.py").read_text(encoding="utf-8").replace(redaction.__name__, PACKAGE)
        for name in redaction.MODULES
    }


def _redact(level: Level, texts: dict[str, str]) -> "Callable[..., Column]":
    """One function for both columns, so that a row goes to Python once.

    It is local and names nothing of this module, so that it is sent as its own code.
    """
    last = f"{PACKAGE}.{redaction.MODULES[-1]}"
    parts = {f"{PACKAGE}.{name}": text for name, text in texts.items()}

    def redact(payload: pa.Array, error: pa.Array) -> pa.Array:
        import sys  # noqa: PLC0415 - an executor knows this function alone
        import types  # noqa: PLC0415 - the same

        import pyarrow  # noqa: ICN001, PLC0415 - the same

        if last not in sys.modules:
            for name, text in parts.items():
                module = types.ModuleType(name)
                sys.modules[name] = module
                exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - the text of our own file
        redactor = sys.modules[last].Redactor(level)
        columns = [
            pyarrow.array([None if text is None else change(text) for text in said.to_pylist()], "string")
            for said, change in ((payload, redactor.payload), (error, redactor.text))
        ]
        return pyarrow.StructArray.from_arrays(columns, ["payload", "error"])

    made: Callable[..., Column] = F.arrow_udf(redact, "payload string, error string")  # type: ignore[attr-defined]
    return made
