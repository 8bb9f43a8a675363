"""The redaction of the audit stream as columns of Spark.

Rule 1: there is one definition, `core.redaction`. That file needs the standard library alone, so its text is
        sent along with the function that uses it, and executors need no postroom.
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
MODULE: Final = "postroom_redaction"
"""What the file is called on an executor."""


def redacted(level: Level) -> "dict[str, Column]":
    """The columns that may say too much, redacted."""
    if level == "none":
        return {}
    payload, error = F.col("payload"), F.col("error")
    readable = F.when(~payload.startswith(ENCRYPTED), payload)
    both = _redact(level, Path(redaction.__file__).read_text(encoding="utf-8"))(readable, error)
    return {
        "payload": F.coalesce(both["payload"], payload),
        "error": F.coalesce(both["error"], error),
    }


def _redact(level: Level, source: str) -> "Callable[..., Column]":
    """One function for both columns, so that a row goes to Python once.

    It is local and names nothing of this module, so that it is sent as its own code.
    """
    name = MODULE

    def redact(payload: pa.Array, error: pa.Array) -> pa.Array:
        import sys  # noqa: PLC0415 - an executor knows this function alone
        import types  # noqa: PLC0415 - the same

        import pyarrow  # noqa: ICN001, PLC0415 - the same

        if name not in sys.modules:
            module = types.ModuleType(name)
            sys.modules[name] = module
            exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 - the text of our own file
        redactor = sys.modules[name].Redactor(level)
        columns = [
            pyarrow.array([None if text is None else change(text) for text in texts.to_pylist()], "string")
            for texts, change in ((payload, redactor.payload), (error, redactor.text))
        ]
        return pyarrow.StructArray.from_arrays(columns, ["payload", "error"])

    made: Callable[..., Column] = F.arrow_udf(redact, "payload string, error string")  # type: ignore[attr-defined]
    return made
