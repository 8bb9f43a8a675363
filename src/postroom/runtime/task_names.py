"""The ids of tasks as callers know them, and as the store has them.

Rule 1: an id that a caller of an organization gives is one within the organization. Others have theirs.
Rule 2: a caller of an organization sees its ids as it gave them. Operators see whose they are.
Rule 3: an id that the store made, an earlier version has stored, or an operator gave, is the same for all.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from postroom.contracts.task_operations import NewTask
from postroom.contracts.task_views import TaskInfo, TaskLine
from postroom.core.names import scoped, unscoped
from postroom.errors import InvalidMessage, shown
from postroom.message import Event
from postroom.runtime.agents import Agents, Identity
from postroom.stores.transaction import Transaction


def stored_id(transaction: Transaction, org: str, task_id: str) -> str:
    """The id of a known task in the store, by the one that a caller of the organization knows."""
    if not org or task_id.startswith(transaction.ids.prefix):
        return task_id
    within = scoped(org, task_id)
    return within if transaction.record(within) is not None else task_id


def new_tasks(
    transaction: Transaction, agents: Agents, caller: Identity, tasks: Sequence[NewTask]
) -> list[NewTask]:
    """Tasks of a caller with their ids in the store. Raises when its agent could not tell them apart."""
    return [
        new
        if new.task_id is None and not (new.parent and caller.org)
        else replace(
            new,
            task_id=None if new.task_id is None else _new_id(transaction, agents, caller.org, new),
            parent=stored_id(transaction, caller.org, new.parent) if new.parent else "",
        )
        for new in tasks
    ]


def _new_id(transaction: Transaction, agents: Agents, org: str, new: NewTask) -> str:
    task_id: str = new.task_id
    owner = org or agents.task_owner(new.agent)
    within = scoped(owner, task_id)
    is_known = bool(owner) and transaction.record(within) is not None
    if not org:
        if is_known:
            raise InvalidMessage(f"the id {shown(task_id)} is taken by a task of organization {owner!r}")
        return task_id
    known = None if is_known else transaction.record(task_id)
    if known is None:
        return within
    is_repeated = (known.queue, known.sender) == (new.agent, new.sender)
    return task_id if is_repeated or agents.task_owner(known.queue) == org else within


def shown_task(caller: Identity, task: TaskInfo) -> TaskInfo:
    """A task as the caller sees it."""
    org = caller.org
    return replace(
        task,
        task_id=unscoped(org, task.task_id),
        parent=unscoped(org, task.parent),
        history=[shown_event(caller, event) for event in task.history],
    )


def shown_line(caller: Identity, line: TaskLine) -> TaskLine:
    """A line of a list as the caller sees it."""
    return replace(line, task_id=unscoped(caller.org, line.task_id)) if caller.org else line


def shown_event(caller: Identity, event: Event) -> Event:
    """An event of a task as the caller sees it."""
    if not caller.org:
        return event
    return replace(
        event,
        message_id=unscoped(caller.org, event.message_id),
        parent_message_id=unscoped(caller.org, event.parent_message_id),
    )
