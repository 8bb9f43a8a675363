"""The global queue, without goals and sandboxes: `goals.engine` adds them.

`message_input` checks submitted messages, `rules.operations` are the verbs inside one transaction,
`rules.claims` decides which messages a worker gets, `work.worker` runs handlers, and `rules.policy` holds
every rule that can be set. `core` names the parts of an engine: `commits`, `submits`, `wakeups`, types and
handlers. `agents.agent_operations`, `agents.inboxes` and `agents.leases` are the verbs of agents, and
`agents.coordinator` hands agents the answers to their requests. `rules.extensions` and `additions` are where
the layers above add to an engine.
"""

from postroom.core.agents import AgentRules
from postroom.core.lifecycle.backpressure import Backpressure
from postroom.core.lifecycle.breaker import Breaker
from postroom.core.lifecycle.retry import NEVER, Retry
from postroom.engine.agents.coordinator import Coordinator
from postroom.engine.global_queue import GlobalQueue
from postroom.engine.handle import Handle
from postroom.engine.rules.policy import Guard, Organization, Policy

__all__ = [
    "NEVER",
    "AgentRules",
    "Backpressure",
    "Breaker",
    "Coordinator",
    "GlobalQueue",
    "Guard",
    "Handle",
    "Organization",
    "Policy",
    "Retry",
]
