"""What goals and the registry of operations add to the transactions of every engine.

Rule 1: an operation is released before its goal goes on, because that may complete other messages.
"""

from postroom.engine.rules import extensions
from postroom.goals import goal_retention, progress, registry

extensions.on_submit.append(progress.check)
extensions.on_accept.append(progress.accepted)
extensions.on_claim.append(registry.OperationRegistry)
extensions.on_effect.append(progress.effect_begun)
extensions.on_effect_dropped.append(progress.effect_dropped)
extensions.on_release.append(registry.released)
extensions.on_complete.extend([registry.completed, progress.completed])
extensions.on_end.extend([registry.released, progress.ended])
extensions.on_replay.append(progress.reopened)
extensions.on_forget.append(progress.forgotten)
extensions.on_purge.append(goal_retention.purge)
