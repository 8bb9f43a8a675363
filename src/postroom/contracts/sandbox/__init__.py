"""`Sandbox`: where the code of an agent runs, with limits and apart from everything else."""

from postroom.contracts.sandbox.pool import SandboxPool
from postroom.contracts.sandbox.sandbox import Completed, Sandbox

__all__ = ["Completed", "Sandbox", "SandboxPool"]
