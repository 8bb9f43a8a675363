"""The queries and bodies of the routes of the live page."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import LETTERS_MAX, Id, Name, Number, Scope, Text
from postroom.message import State

LINES_DEFAULT = 50
LINES_MAX = 200
LETTERS_DEFAULT = 50
QUEUES_DEFAULT = 100
BUS_LINES_DEFAULT = 100

Lines = Annotated[int, Meta(ge=1, le=LINES_MAX)]


class SignInBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/sign-in`."""

    token: Annotated[str, Meta(max_length=256)]


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/stream`: `after` is the last event that the page has, where a header cannot say it."""

    after: Text = ""


class MessagesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/messages`: the newest first. `before` is the cursor of the previous page."""

    org_id: Name | UnsetType = UNSET
    state: State | UnsetType = UNSET
    type: Text = ""
    text: Text = ""
    before: Number = 0
    limit: Lines = LINES_DEFAULT


class LettersQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/dead-letters`: `after` is the id of the last dead letter of the previous page."""

    org_id: Name | UnsetType = UNSET
    type: Text | UnsetType = UNSET
    error_type: Text | UnsetType = UNSET
    after: Id | UnsetType = UNSET
    limit: Lines = LETTERS_DEFAULT

    @property
    def filters(self) -> dict[str, object]:
        """The filters of the contract."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class ReplayBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/replay`: by ids, or by the filters of the list. A preview changes nothing."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=LETTERS_MAX)] | None = None
    org_id: Name | None = None
    type: Text | None = None
    error_type: Text | None = None
    is_preview: bool = True

    @property
    def filters(self) -> dict[str, object]:
        """The filters of the contract."""
        names = ("org_id", "type", "error_type")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**chosen, "limit": LETTERS_MAX}


class RollbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/goals/{id}/rollback`. A preview changes nothing."""

    checkpoint_id: Text
    accept_irreversible: list[Text] = []
    is_preview: bool = True


class TaskQueuesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/tasks`: `after` is the name of the last agent of the previous page."""

    after: Text = ""
    limit: Lines = QUEUES_DEFAULT


class TasksQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/agents/{agent}/tasks`: the newest first. `before` is the cursor of the previous page."""

    state: State | UnsetType = UNSET
    before: Number = 0
    limit: Lines = LINES_DEFAULT


class BusQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/buses/{name}`: without `since`, the newest messages."""

    since: Text = ""
    org_id: Scope = ""
