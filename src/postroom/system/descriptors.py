"""The limit of open files and sockets of this process."""

import contextlib
import resource


def raise_descriptor_limit(at_most: int) -> int:
    """Raise the soft limit of open files to the hard limit; returns the limit, or `at_most` if lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return at_most if soft == resource.RLIM_INFINITY else min(soft, at_most)
