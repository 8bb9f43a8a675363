"""`Engine`, the global queue: see `engine`.

`message_input` checks submitted messages, `operations` are the verbs inside one transaction, `claims` decides
which messages a worker gets, `worker` runs handlers, and `policy` holds every rule that can be set. `agents`
are the verbs of agents, and `coordinator` hands agents the answers to their requests.
"""

from postroom.core.agents import AgentRules
from postroom.core.lifecycle.backpressure import Backpressure
from postroom.core.lifecycle.breaker import Breaker
from postroom.core.lifecycle.retry import Retry
from postroom.engine.agents.coordinator import Coordinator
from postroom.engine.engine import Engine
from postroom.engine.handle import Handle
from postroom.engine.rules.policy import Guard, Organization, Policy

__all__ = [
    "AgentRules",
    "Backpressure",
    "Breaker",
    "Coordinator",
    "Engine",
    "Guard",
    "Handle",
    "Organization",
    "Policy",
    "Retry",
]
