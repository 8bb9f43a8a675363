"""The archive of Spark's classes, which a JVM maps into its memory instead of loading them.

Rule: the archive is optional. A JVM that it does not fit, after an update of Java or Spark, starts without
it.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from postroom.errors import InvalidSetting
from postroom.settings import xdg_folder

CACHE: Final = "POSTROOM_CACHE"  # an environment variable: the folder of the archive
# Otherwise the JVM warns about an archive that does not fit, and about every class that a new one omits.
QUIET_USING: Final = "-Xlog:cds=off,cds+dynamic=off,class+path=off"
QUIET_MAKING: Final = "-Xlog:disable -Xlog:all=error:stderr"


def found() -> Path | None:
    """The archive of this Java and this Spark."""
    with suppress(InvalidSetting, OSError):  # there is no such folder, or the archive is being replaced
        for path in cache().glob(name_of("*")):
            # The size is part of the name, because a truncated archive would crash the JVM.
            if path.name == name_of(path.stat().st_size):
                return path
    return None


def name_of(size: int | str) -> str:
    """The file name of an archive of this size."""
    import pyspark  # noqa: PLC0415 - lazy

    java = find_java()
    version = "-" if java is None else f"{java} {java.stat().st_mtime_ns}"
    spark = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    which = hashlib.sha256(f"{version} {spark} {pyspark.__version__}".encode()).hexdigest()
    return f"spark-{which[:16]}-{size}.jsa"


def find_java() -> Path | None:
    """The Java that Spark starts."""
    own = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{own}/bin" if own else None)
    return None if java is None else Path(java).resolve()


def cache() -> Path:
    """The folder of the archive, which need not exist."""
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
    """The JVM options that use the archive, if there is one."""
    path = found()
    return "" if path is None else f" {_quoted(f'-XX:SharedArchiveFile={path}')} {QUIET_USING}"


def making_archive(target: Path) -> str:
    """The JVM options that write an archive at exit. Compilation is quick, because all code runs once."""
    return f" {_quoted(f'-XX:ArchiveClassesAtExit={target}')} -XX:TieredStopAtLevel=1 {QUIET_MAKING}"


def _quoted(option: str) -> str:
    """One option, quoted for Spark's parser."""
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
