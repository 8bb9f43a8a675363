"""`Engine`, the global queue: see `engine`.

`message_input` checks submitted messages, `operations` are the verbs inside one transaction, `claims` decides
which messages a worker gets, `worker` runs handlers, and `policy` holds every rule that can be set. `agents`
are the verbs of agents, and `coordinator` hands agents the answers to their requests.
"""

from postroom.contracts.engine.coordinator import Coordinator
from postroom.contracts.engine.engine import Engine
from postroom.contracts.engine.handle import Handle
from postroom.contracts.engine.policy import Guard, Organization, Policy
from postroom.core.admission import Backpressure
from postroom.core.agents import AgentRules
from postroom.core.breaker import Breaker
from postroom.core.retry import Retry

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
