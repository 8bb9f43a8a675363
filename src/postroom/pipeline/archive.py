"""Where the archive of Spark's classes is, which a JVM maps into its memory instead of reading them.

Rule: an archive is an offer. A JVM that it does not fit, because Java or Spark was renewed, starts as if
there were none.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Final

CACHE: Final = "POSTROOM_CACHE"  # of the environment: a folder for what can be made anew
QUIET: Final = "-Xlog:disable -Xlog:all=error:stderr"  # it would tell of every class that was left out


def found() -> Path | None:
    """The archive of this Java and this Spark."""
    # Its size is part of its name: a JVM does not survive one whose end is missing.
    return next(
        (path for path in cache().glob(name_of("*")) if path.name == name_of(path.stat().st_size)), None
    )


def name_of(size: int | str) -> str:
    """What the archive is called if it has so many bytes."""
    import pyspark  # noqa: PLC0415 - only who runs a job pays for it

    home = os.environ.get("JAVA_HOME")
    java = Path(shutil.which("java", path=f"{home}/bin" if home else None) or "java").resolve()
    renewed = java.stat().st_mtime_ns if java.exists() else 0
    spark = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    told = "\n".join((str(java), str(renewed), spark, pyspark.__version__))
    return f"spark-{hashlib.sha256(told.encode()).hexdigest()[:16]}-{size}.jsa"


def cache() -> Path:
    if own := os.environ.get(CACHE):
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postroom"


def using_archive() -> str:
    """What a JVM is told to use the archive, if there is one."""
    path = found()
    return "" if path is None else f' "-XX:SharedArchiveFile={path}" {QUIET}'


def making_archive(target: Path) -> str:
    """What a JVM is told to leave one behind. It compiles quickly, as it runs everything once."""
    return f' "-XX:ArchiveClassesAtExit={target}" -XX:TieredStopAtLevel=1 {QUIET}'
