"""The types of the fields of verbs, and their limits."""

from typing import Annotated, Literal

from msgspec import Meta

FORMAT_VERSION = "1.0.0"  # of messages
LEASE_S = 300.0  # from the last heartbeat
LEASE_S_MAX = 30 * 86_400.0
DELAY_S_MAX = 366 * 86_400.0
WAIT_S_MAX = 30.0
EXPIRES_S_MAX = 10 * 365 * 86_400.0
JSON_DEPTH_MAX = 200  # a deeper value could be stored, but a caller deep in a stack could not decode it
BODY_DEPTH_MAX = JSON_DEPTH_MAX + 3  # a payload in a task in a list of a body
RESULT_BYTES_MAX = 1024 * 1024
SMALL_BODY_BYTES_MAX = 64 * 1024  # a body without a payload
GOAL_BYTES_MAX = 2 * SMALL_BODY_BYTES_MAX  # a body with a context or a node, of 64 KiB each
COMPLETE_BYTES_MAX = RESULT_BYTES_MAX + SMALL_BODY_BYTES_MAX
ENQUEUE_BYTES_MAX = 16 * 1024 * 1024
BUS_POST_BYTES_MAX = 4 * 1024 * 1024
RETRIES_MAX = 1_000
CLAIM_MAX = 1_000
ENQUEUE_MANY_MAX = 1_000
LETTERS_MAX = 1_000
REPLAYED_NAMED_MAX = 1_000  # ids in the answer of one replay
OPEN_REQUESTS_MAX = 1_000  # of one agent
BOUNCES_A_READ_MAX = 100
LETTERS_A_READ_MAX = 100  # messages of an inbox
NAMES_MAX = 1_000  # in one permission of a token
TOKENS_MAX = 10**12  # of one message, and of one limit
PAGE_DEFAULT = 100
PAGE_MAX = 1_000
NUMBER_MAX = 2**63 - 1
TEXT_CHARS_MAX = 256
KEY_CHARS_MAX = 512
NAME_CHARS_MAX = 128  # with every suffix added to it, a file name stays below the usual limit of 255
SCOPED_CHARS_MAX = 2 * NAME_CHARS_MAX + 2  # of a name within an organization

Name = Annotated[
    str, Meta(min_length=1, max_length=NAME_CHARS_MAX, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$")
]  # fmt: skip
Scope = Annotated[str, Meta(max_length=NAME_CHARS_MAX, pattern="^([A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Agent = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=SCOPED_CHARS_MAX,
        pattern="^(@[A-Za-z0-9][A-Za-z0-9._-]*:)?[A-Za-z0-9][A-Za-z0-9._-]*$",
    ),
]
"""An agent whose tasks are meant. Only callers of no organization name one of an organization."""
Names = Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)]
Id = Annotated[str, Meta(min_length=1, max_length=SCOPED_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Key = Annotated[str, Meta(min_length=1, max_length=KEY_CHARS_MAX)]
BounceKey = Annotated[str, Meta(max_length=160, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*/[0-9]{1,18}$")]
InboxKey = Annotated[str, Meta(pattern="^[0-9]{1,18}$")]
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Cursor = Annotated[str, Meta(pattern="^[0-9]{0,19}$")]
Page = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
Priority = Annotated[int, Meta(ge=0, le=3)]
Retries = Annotated[int, Meta(ge=0, le=RETRIES_MAX)]
Session = Annotated[int, Meta(ge=1)]
Wait = Annotated[float, Meta(ge=0, le=WAIT_S_MAX)]
Delay = Annotated[float, Meta(ge=0, le=DELAY_S_MAX)]
Rate = Annotated[float, Meta(ge=0, le=1_000_000.0)]  # as in the settings, which no client loads
Role = Literal["agent", "operator", "admin"]
