"""The columns of an event: the fields of a line of a segment, and their types in Spark.

Rule 1: the schema is explicit, and nothing is inferred. Fields that this version does not know are kept in
        `rescued`, as JSON.
Rule 2: times are µs as long, money is an exact decimal, `detail` stays JSON text.
Rule 3: a field that a line omits is NULL.
"""

from typing import Final

from pyspark.sql.types import (
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

CORRUPT: Final = "_corrupt"
"""The text of a line that could not be parsed as an event."""
RESCUED: Final = "rescued"
"""The fields of a line that this version does not know, as one JSON object."""
MARK: Final = "redaction"
"""The mark of the redaction that the shipper has applied to a line; see `audit.redaction_marks`."""
NOT_IN_LINE: Final = ("segment", MARK, "date", CORRUPT)
"""Columns of bronze that are not part of a line."""
REQUIRED: Final = ("event_id", "seq", "ts_us", "kind", "contract", "source")
"""A line without one of these is not an event."""
MONEY: Final = DecimalType(18, 9)

_NOT_TEXT: Final[dict[str, DataType]] = {
    "seq": LongType(),
    "ts_us": LongType(),
    "schema": IntegerType(),
    "priority": IntegerType(),
    "attempt": IntegerType(),
    "duration_us": LongType(),
    "tokens_in": LongType(),
    "tokens_out": LongType(),
    "cost_usd": MONEY,
    "body_bytes": LongType(),
    "lease": LongType(),
}
_FIELDS: Final = [
    "event_id",
    "seq",
    "ts_us",
    "kind",
    "contract",
    "source",
    "schema",
    "queue",
    "org_id",
    "user_id",
    "agent_id",
    "message_id",
    "goal_id",
    "task_id",
    "parent_message_id",
    "type",
    "priority",
    "state",
    "attempt",
    "worker_id",
    "trace_id",
    "span_id",
    "duration_us",
    "error_type",
    "error",
    "model",
    "tokens_in",
    "tokens_out",
    "cost_usd",
    "body_bytes",
    "payload",
    "sender",
    "recipient",
    "service",
    "lease",
    "prior",
    "detail",
]

EVENTS: Final = StructType([StructField(name, _NOT_TEXT.get(name, StringType())) for name in _FIELDS])
LINES: Final = StructType([*EVENTS.fields, StructField(CORRUPT, StringType())])
"""`EVENTS`, and a last column for a line that is not an event."""
