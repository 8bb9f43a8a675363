"""Default handlers of the message types about agents. A registered handler of the type replaces them."""

from typing import TYPE_CHECKING, Any, Final

from postroom.engine.agents.agent_operations import AgentOperations, check_names
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.agents.leases import WantedPrograms
from postroom.engine.messages import Message
from postroom.engine.work.handlers import Handler
from postroom.errors import ValidationError

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

PROMPT_CHARS_MAX: Final = 16_000  # the environment of a program holds it


def default_handlers(core: "EngineCore") -> dict[str, Handler]:
    """The default handler of each type that has one."""

    async def deliver(message: Message, _context: Any) -> None:
        """Put a message into the inbox of its recipient, unless `Agent.send` has done so."""
        to, body = _field(message, "to"), message.payload.get("body")

        def work(operations: Any) -> None:
            inboxes = Inboxes(AgentOperations(operations.transaction, core.policy))
            if not inboxes.receipts(message.message_id):
                inboxes.check_recipient(message.org_id, to)
                inboxes.deliver(message.org_id, to, message.agent_id, message.message_id, body)

        await core.commits.write(work, makes_room=True)
        core.wakeups.wake_readers()

    async def spawn(message: Message, _context: Any) -> dict[str, Any]:
        """Store that a supervisor has to run the program as this agent, or that the agent sleeps."""
        agent_id = _field(message, "agent_id")
        tools = _tool_names(message.payload.get("tools", []))
        prompt = _prompt(message.payload.get("prompt", ""))
        check_names(message.org_id, agent_id)
        has_program = await core.commits.write(
            lambda operations: WantedPrograms(operations.transaction, core.policy).want(
                message.org_id, agent_id, message.message_id, tools, prompt
            )
        )
        return {"agent_id": agent_id} if has_program else {"agent_id": agent_id, "health": "asleep"}

    async def terminate(message: Message, _context: Any) -> dict[str, Any]:
        """Store that the program of this agent has to end."""
        agent_id = _field(message, "agent_id")
        ended = await core.commits.write(
            lambda operations: WantedPrograms(operations.transaction, core.policy).unwant(
                message.org_id, agent_id
            ),
            makes_room=True,
        )
        return {"agent_id": agent_id, "ended": ended}

    return {
        "agent_message": Handler(run=deliver, is_own=True),
        "agent_spawn": Handler(run=spawn, is_own=True),
        "agent_terminate": Handler(run=terminate, is_own=True),
    }


def _tool_names(tools: Any) -> list[str]:
    """The names of tools, each given as text or as `{"name": …, "sandbox": …}`."""
    given = tools if isinstance(tools, list) else [None]
    named = [tool.get("name") if isinstance(tool, dict) else tool for tool in given]
    names = [name for name in named if isinstance(name, str)]
    if len(names) < len(named):
        raise ValidationError('the tools of an agent are a list of names or of {"name": …, "sandbox": …}')
    return names


def _prompt(prompt: Any) -> str:
    if not isinstance(prompt, str) or len(prompt) > PROMPT_CHARS_MAX or "\0" in prompt:
        raise ValidationError(f"the prompt of an agent is a text of up to {PROMPT_CHARS_MAX} characters")
    return prompt


def _field(message: Message, name: str) -> str:
    value = message.payload.get(name) if isinstance(message.payload, dict) else None
    if not isinstance(value, str) or not value:
        raise ValidationError(f"the payload of {message.type} needs {name}, a text")
    return value
