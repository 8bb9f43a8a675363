"""Which tool undoes what another one did, by their names and the arguments that they take.

Rule 1: a reversal gets only values that the effect was called with or returned. Neither the rules nor an
        adviser invent one.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import msgspec

from postroom.core.goals.advice import ReversalClass

NAME_AND_ARGUMENTS: Final = 0.9
"""The confidence of the rules when the name fits and every required argument is known."""
NAME_ALONE: Final = 0.4
"""The same when the arguments that a tool takes are not known: a person decides."""

_UNDONE_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "create": ("delete", "remove", "destroy", "cancel"),
    "add": ("remove", "delete"),
    "insert": ("delete", "remove"),
    "upload": ("delete", "remove"),
    "register": ("unregister", "deregister"),
    "book": ("cancel", "unbook"),
    "order": ("cancel",),
    "schedule": ("unschedule", "cancel"),
    "reserve": ("release", "cancel"),
    "invite": ("uninvite", "cancel"),
    "charge": ("refund",),
    "pay": ("refund",),
}
_TOGGLES: Final = (
    ("open", "close"), ("start", "stop"), ("enable", "disable"), ("lock", "unlock"), ("grant", "revoke"),
    ("assign", "unassign"), ("subscribe", "unsubscribe"), ("attach", "detach"), ("join", "leave"),
    ("activate", "deactivate"), ("archive", "unarchive"), ("publish", "unpublish"), ("pin", "unpin"),
    ("mute", "unmute"), ("block", "unblock"),
)  # fmt: skip
_PAIRS: Final = {
    *((done, undone) for done, all_undone in _UNDONE_BY.items() for undone in all_undone),
    *chain.from_iterable(((one, other), (other, one)) for one, other in _TOGGLES),
}
_VISIBLE_WORDS: Final = frozenset(
    {"charge", "pay", "order", "book", "transfer", "invoice", "send", "publish", "post", "invite"}
)
"""What these words name stays visible to others after it was undone."""
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_JSON_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class KnownTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A handler or an MCP tool that a message can call."""

    name: str
    type: str
    service: str = ""
    tool: str = ""
    """The tool that the payload names; empty when the payload is the arguments."""
    description: str = ""
    arguments: dict[str, str] | None = None
    """The JSON type of each argument; None when they are not known."""
    required: list[str] = []
    annotations: dict[str, Any] = {}

    def message(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The reversal that calls this tool."""
        payload = {"tool": self.tool, "arguments": arguments} if self.tool else dict(arguments)
        return {"type": self.type, "payload": payload, "service": self.service}


# ---- names -----------------------------------------------------------------------------------------


def words(name: str) -> list[str]:
    """The words of a name such as `create_event`, `events.create` or `createEvent`."""
    return [word.casefold() for word in _WORD.findall(name)]


def undoes(candidate: str, done: str) -> bool:
    """Whether a name is that of the opposite: the same words, but for one pair such as create and delete."""
    mine, theirs = words(candidate), words(done)
    differing = [(was, now) for was, now in zip(theirs, mine, strict=False) if was != now]
    return len(mine) == len(theirs) and len(differing) == 1 and differing[0] in _PAIRS


def class_of(done: str) -> ReversalClass:
    """The class of an effect for which a reversal was found."""
    return "COMPENSATABLE" if _VISIBLE_WORDS.intersection(words(done)) else "REVERSIBLE"


# ---- arguments -------------------------------------------------------------------------------------


def filled(tool: KnownTool, called_with: Any, outcome: Any) -> dict[str, Any] | None:
    """The arguments of a reversal, from those of the effect and its outcome; None when one is missing.

    A tool whose arguments are not known gets those of the effect.
    """
    called = called_with if isinstance(called_with, dict) else {}
    if tool.arguments is None:
        return dict(called)
    found = {}
    for name, json_type in tool.arguments.items():
        values = [value for value in _named(name, called, outcome) if _fits(value, json_type)]
        if values:
            found[name] = values[0]
        elif name in tool.required:
            return None
    return found


def chosen(
    tool: KnownTool, given: Mapping[str, Any], called_with: Any, outcome: Any
) -> dict[str, Any] | None:
    """The arguments that an adviser chose, if the tool takes them and each value is one of the effect."""
    known = _leaves(called_with) + _leaves(outcome)
    takes = tool.arguments is None or given.keys() <= tool.arguments.keys()
    if not given or not takes or not given.keys() >= set(tool.required):
        return None
    return dict(given) if all(leaf in known for leaf in _leaves(dict(given))) else None


def _named(name: str, called: Mapping[str, Any], outcome: Any) -> list[Any]:
    """Values that an argument of this name may have, the likeliest first."""
    while isinstance(outcome, dict) and outcome.keys() == {"result"}:  # how MCP wraps what is no object
        outcome = outcome["result"]
    answer = outcome if isinstance(outcome, dict) else {}
    inner = [value for value in answer.values() if isinstance(value, dict)]
    found = [place[name] for place in (answer, *inner, called) if name in place]
    if words(name)[-1:] == ["id"]:
        found += [place["id"] for place in (answer, *inner) if "id" in place]
        is_id = isinstance(outcome, int) or (isinstance(outcome, str) and not re.search(r"\s", outcome))
        found += [outcome] if is_id else []  # text with spaces is a sentence about what was done
    return found


def _fits(value: Any, json_type: str) -> bool:
    types = _JSON_TYPES.get(json_type)
    is_bool = isinstance(value, bool)
    return types is None or (isinstance(value, types) and (is_bool == (json_type == "boolean")))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [leaf for each in inner for leaf in _leaves(each)]
    return [value]
