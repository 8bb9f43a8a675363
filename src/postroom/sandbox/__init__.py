"""`Sandbox`: where the code of an agent runs, with limits and apart from everything else."""

from postroom.sandbox.pool import SandboxPool
from postroom.sandbox.sandbox import Completed, Sandbox

__all__ = ["Completed", "Sandbox", "SandboxPool"]
