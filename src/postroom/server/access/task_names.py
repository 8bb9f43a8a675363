"""The ids of tasks and the queues of agents as callers know them, and as the store has them.

Rule 1: an id or an agent that a caller of an organization names is one within the organization.
Rule 2: a caller of an organization sees its names as it gave them. Operators see whose they are.
Rule 3: an id that an earlier version has stored, or an operator gave, is the same for all.
Rule 4: an id that the store made contains a number of the whole store. A caller of an organization sees it
        covered, and so it sees numbers of events and places in lists. A number that it was not given is
        unknown, as an id is: what it finds would count the store.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from postroom.contracts.tasks.task_operations import NewTask
from postroom.contracts.tasks.task_views import TaskInfo, TaskLine, queues_of_agents
from postroom.core.gate import UNKNOWN, Owner, permit
from postroom.core.names import scoped, split_scoped, unscoped
from postroom.errors import InvalidMessage, shown
from postroom.message import Event, Record, org_of
from postroom.server.access.registry import Agents, Identity
from postroom.stores.own_ids import OwnIds
from postroom.stores.transaction import Transaction


def stored_id(transaction: Transaction, org: str, task_id: str) -> str:
    """The id of a known task or message in the store, by the one that a caller of the organization knows."""
    ids = transaction.ids
    own, within = ids.uncover_id(task_id), scoped(org, task_id)
    if not org:
        return own
    if ids.is_guess(task_id):
        return within
    if ids.own_number(own) and transaction.records.get(own) is not None:
        return own
    return within if transaction.records.get(within) is not None else task_id


def stored_place(ids: OwnIds, org: str, shown: int) -> int:
    """The number in the store that a list or a stream goes on from, by the one that a caller knows."""
    number = ids.place(shown, ids.rule.plain_max) if org else ids.uncover(shown)
    if number is None:
        raise InvalidMessage("the place to go on from must be a number of an earlier answer")
    return number


def place_of(ids: OwnIds, cursor: str) -> int:
    """The number in the store that a list goes on from, by the cursor of an earlier page; 0 for none."""
    number = ids.place(int(cursor or 0))
    if number is None:
        raise InvalidMessage("'cursor' must be the cursor of an earlier answer: load the list again")
    return number


def cursor_of(ids: OwnIds, number: int) -> str:
    """The cursor of the next page. It is covered, because numbers count the records of all organizations."""
    return str(ids.cover(number)) if number else ""


def is_lease(ids: OwnIds, org: str, record: Record, shown: int) -> bool:
    """Whether a number is the lease of a record, which is negative after a release, as the caller knows it.

    A lease that an earlier version has shown is the number of the store itself.
    """
    lease = abs(record.lease)
    is_plain = shown == lease and (not org or lease <= ids.rule.plain_max)
    return is_plain or shown == ids.fence(record.attempt, lease)


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
    owner = org or _org_of(agents, new.agent)
    within = scoped(owner, task_id)
    is_known = bool(owner) and transaction.records.get(within) is not None
    if not org:
        if is_known:
            raise InvalidMessage(f"the id {shown(task_id)} is taken by a task of organization {owner!r}")
        return task_id
    known = None if is_known or transaction.ids.is_guess(task_id) else transaction.records.get(task_id)
    if known is None:
        return within
    is_repeated = (known.queue, known.sender) == (new.agent, new.sender)
    return task_id if is_repeated or _org_of(agents, known.queue) == org else within


def _org_of(agents: Agents, queue: str) -> str:
    """The organization whose agent has a queue; empty for none."""
    return split_scoped(queue)[0] or agents.owner_of(queue)


# ---- queues ----------------------------------------------------------------------------------------


def own_queue(agents: Agents, caller: Identity) -> str | None:
    """The queue of the caller's agent; None for a caller that may use all of them."""
    return None if caller.is_operator else agents.queue_of(caller.org, caller.name)


def queue_owner(agents: Agents, caller: Identity, queue: str, sender: str = "") -> Owner:
    """The owner of a task in a queue, in the words of the caller. Unknown in a queue that it cannot name."""
    name, own = unscoped(caller.org, queue), own_queue(agents, caller)
    known_sender = caller.name if sender and sender == own else ""
    if agents.queue_of(caller.org, name) == queue:
        return Owner(caller.org, name, known_sender)
    return Owner(caller.org, "", known_sender) if known_sender else UNKNOWN


def reads(agents: Agents, caller: Identity, queue: str) -> bool:
    """Whether the caller may read the tasks in a queue."""
    return permit(caller, "task.list", queue_owner(agents, caller, queue))


def readable_queues(transaction: Transaction, agents: Agents, caller: Identity) -> list[str]:
    """The queues of agents that the caller reads, and that were used. Those of others are not looked at."""
    if caller.is_operator:
        return queues_of_agents(transaction)
    plain = agents.plain_queues(caller.org) if caller.org else [caller.name]
    found = [queue for queue in plain if transaction.lanes.depth(queue)]
    if caller.org:
        found += transaction.lanes.queues(scoped(caller.org, ""))
    return [queue for queue in found if reads(agents, caller, queue)]


def target_of(transaction: Transaction, agents: Agents, caller: Identity, name: str) -> str:
    """The queue that gets a task for an agent.

    A caller of no organization means that of the plain name, or else that of the only organization with such
    an agent. A queue that was used goes on: no organization gets what was meant for somebody else.
    """
    known, orgs = known_target(agents, caller, name), agents.orgs_of(name)
    if known is not None or not orgs or transaction.lanes.depth(name):
        return known or name
    if len(orgs) > 1:
        raise InvalidMessage(
            f"several organizations have an agent {name!r}: name one of them, as in @{min(orgs)}:{name}"
        )
    return scoped(min(orgs), name)


def known_target(agents: Agents, caller: Identity, name: str) -> str | None:
    """The target queue, decided by names alone; None when the content of the store decides."""
    if caller.org and (name not in caller.registered_targets or caller.org in agents.orgs_of(name)):
        return agents.queue_of(caller.org, name)
    return name if caller.org or not agents.orgs_of(name) else None


# ---- answers ---------------------------------------------------------------------------------------


def shown_id(ids: OwnIds, org: str, task_id: str) -> str:
    """The id of a task as callers of an organization see it. One that they gave stays the same."""
    given = unscoped(org, task_id)
    return ids.cover_id(task_id) if org and given == task_id else given


def shown_number(ids: OwnIds, org: str, number: int) -> int:
    """The number of a record or event as callers of an organization see it."""
    return ids.cover(number) if org else number


def shown_task(ids: OwnIds, caller: Identity, task: TaskInfo) -> TaskInfo:
    """A task as the caller sees it."""
    org = caller.org
    if not org:
        return task
    return replace(
        task,
        task_id=shown_id(ids, caller.org, task.task_id),
        agent=unscoped(org, task.agent),
        parent=shown_id(ids, caller.org, task.parent),
        sender=unscoped(org, task.sender),
        idempotency_key=task.idempotency_key.replace(f"@{scoped(org, '')}", "@", 1),
        history=[shown_event(ids, caller, event) for event in task.history],
    )


def shown_line(ids: OwnIds, caller: Identity, line: TaskLine) -> TaskLine:
    """A line of a list as the caller sees it."""
    return replace(
        line,
        seq=shown_number(ids, caller.org, line.seq),
        task_id=shown_id(ids, caller.org, line.task_id),
        agent=unscoped(caller.org, line.agent),
    )


def shown_event(ids: OwnIds, caller: Identity, event: Event) -> Event:
    """An event of a task or message as the caller sees it. The parent of a message is any text."""
    org, parent, detail = caller.org, event.parent_message_id, event.detail
    if "decision" in detail and not org_of(event.queue):
        detail = {**detail, "decision": shown_id(ids, org, detail["decision"])}
    return replace(
        event,
        seq=shown_number(ids, org, event.seq),
        queue=unscoped(org, event.queue),
        message_id=shown_id(ids, org, event.message_id),
        parent_message_id=unscoped(org, parent) if org_of(event.queue) else shown_id(ids, org, parent),
        detail=detail,
    )
