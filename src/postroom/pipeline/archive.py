"""Where the archive of Spark's classes is, which a JVM maps into its memory instead of reading them.

Rule: an archive is an offer. A JVM that it does not fit, because Java or Spark was renewed, starts as if
there were none.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from postroom.errors import InvalidSetting
from postroom.settings import xdg_folder

CACHE: Final = "POSTROOM_CACHE"  # of the environment: a folder for what can be made anew
# Otherwise it tells of an archive that does not fit, and of every class that is left out of a new one.
QUIET_USING: Final = "-Xlog:cds=off,cds+dynamic=off,class+path=off"
QUIET_MAKING: Final = "-Xlog:disable -Xlog:all=error:stderr"


def found() -> Path | None:
    """The archive of this Java and this Spark."""
    with suppress(InvalidSetting, OSError):  # there is no such folder, or it is being made anew
        for path in cache().glob(name_of("*")):
            # Its size is part of its name: a JVM does not survive one whose end is missing.
            if path.name == name_of(path.stat().st_size):
                return path
    return None


def name_of(size: int | str) -> str:
    """What the archive is called if it has so many bytes."""
    import pyspark  # noqa: PLC0415 - only who runs a job pays for it

    java = find_java()
    told = "-" if java is None else f"{java} {java.stat().st_mtime_ns}"
    spark = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    which = hashlib.sha256(f"{told} {spark} {pyspark.__version__}".encode()).hexdigest()
    return f"spark-{which[:16]}-{size}.jsa"


def find_java() -> Path | None:
    """The Java that Spark takes."""
    own = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{own}/bin" if own else None)
    return None if java is None else Path(java).resolve()


def cache() -> Path:
    """The folder of the archive. It need not be there."""
    if own := os.environ.get(CACHE):
        folder = Path(own).absolute()
    else:
        refused = f"there is no home folder for the archive: set {CACHE}"
        folder = xdg_folder(os.environ, "XDG_CACHE_HOME", ".cache", refused)
    if os.pathsep in str(folder):
        raise InvalidSetting(
            f"Java takes {folder} for several archives because of the {os.pathsep!r} in it: set {CACHE}"
        )
    return folder


def using_archive() -> str:
    """What a JVM is told to use the archive, if there is one."""
    path = found()
    return "" if path is None else f" {_quoted(f'-XX:SharedArchiveFile={path}')} {QUIET_USING}"


def making_archive(target: Path) -> str:
    """What a JVM is told to leave one behind. It compiles quickly, as it runs everything once."""
    return f" {_quoted(f'-XX:ArchiveClassesAtExit={target}')} -XX:TieredStopAtLevel=1 {QUIET_MAKING}"


def _quoted(option: str) -> str:
    """One option, as Spark takes a line of them apart."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
