"""What an agent should do after an error: one sentence for each kind of error."""

from postroom.errors import (
    Bounced,
    ContextChanged,
    InvalidMessage,
    KeyReused,
    NotAllowed,
    PostroomError,
    ResultGone,
    StaleLease,
    Unavailable,
    UnknownGoal,
    UnknownTask,
    UnknownType,
    WrongState,
)

_HINTS: dict[type[BaseException], str] = {
    Bounced: "Call who_is_there and choose an agent that is alive, or call again once it has joined.",
    StaleLease: "The lease is over: drop this task and call claim for the next one.",
    UnknownTask: "Check the id: search lists messages, and claim gives the id and the lease of a task.",
    WrongState: "Call result with this id to see its state.",
    KeyReused: "Use another idempotency_key, or send the same message as before.",
    ResultGone: "Submit again with a new idempotency_key.",
    UnknownType: "Use one of the types that the sentence names.",
    UnknownGoal: "Check the id: goals lists the goals that you see.",
    ContextChanged: "Call goal_context, and repeat the change with its version.",
    NotAllowed: "Use another tool, or ask an operator for a token with this right.",
    InvalidMessage: "Correct the arguments and call again.",
    Unavailable: "Wait a moment and call again.",
    PostroomError: "Call explain with the id, or ask an operator.",
}


def explained(error: PostroomError) -> str:
    """The sentence of an error, and what to do next."""
    hint = next(_HINTS[kind] for kind in type(error).__mro__ if kind in _HINTS)
    after_s = getattr(error, "retry_after_s", 0.0) or 0.0
    if isinstance(error, Unavailable) and after_s:
        hint = f"Call again after {after_s:g} s."
    sentence = str(error).rstrip()
    return f"{sentence}{'' if sentence.endswith(('.', '!', '?')) else '.'} {hint}"
