"""Goals of an engine: knowledge graph, checkpoints, rollback, recovery, conflicts and decisions."""

import postroom.engine  # noqa: F401 - the engine imports the modules of this package in their order
