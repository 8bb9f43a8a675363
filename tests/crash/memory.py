"""The peak memory of a process."""

from pathlib import Path

KIB_A_MIB = 1024


def peak_mb(pid: int) -> int:
    """The peak memory of a process since it started its program; 0 when it has ended.

    `ru_maxrss` does not give it: a child inherits the figure of the process that forked it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, _, rest = status.partition("VmHWM:")
    return int(rest.split()[0]) // KIB_A_MIB if rest else 0
