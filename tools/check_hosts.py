"""Refuses hosts of package registries in the tracked files.

Rule 1: a package is named without a host: each machine chooses where it gets packages from, and a named host
        looks like one that this project needs.
Rule 2: there are no exceptions. The hosts are listed here in parts, so that this file passes as well.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOSTS = {
    "org": "pypi pythonhosted npmjs anaconda maven packagist rubygems nuget",
    "com": "npmjs yarnpkg mvnrepository sonatype hub.docker unpkg",
    "io": "crates docker ghcr gcr quay jsr",
    "net": "jsdelivr",
    "dev": "pkg go",
    "python.org": "pypi",
    "apache.org": "maven repository",
    "google.com": "maven",
    "microsoft.com": "mcr",
    "ecr.aws": "public",
    "golang.org": "proxy",
}
"""The names of the registries, by the end of their hosts."""
_NAMES = [f"{name}.{end}".encode() for end, names in HOSTS.items() for name in names.split()]
# A longer name is another host, and a file such as `docker.com.py` is none.
_HOST = re.compile(
    rb"(?<![A-Za-z0-9-])(?:%b)(?![A-Za-z0-9-]|\.[A-Za-z0-9])" % b"|".join(map(re.escape, _NAMES)),
    re.IGNORECASE,
)


def found_in(data: bytes) -> list[tuple[int, str]]:
    """The lines that name such a host, with the host."""
    lower = data.lower()
    if not any(name in lower for name in _NAMES):  # the pattern takes far longer than this search
        return []
    return [(data.count(b"\n", 0, match.start()) + 1, match[0].decode()) for match in _HOST.finditer(data)]


def tracked(root: Path) -> list[Path]:
    """The files that git tracks, and those that it would."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout.decode()
    return [path for name in names.split("\0") if name and (path := root / name).is_file()]


def main(root: Path = ROOT) -> int:
    found = [
        f"{path.relative_to(root)}:{line}: {host} is the host of a package registry: leave it out"
        for path in tracked(root)
        for line, host in found_in(path.read_bytes())
    ]
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
