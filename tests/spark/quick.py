"""For a JVM of a test. It compiles much and runs little: the quick compiler is enough, if it has the room."""

from postroom.pipeline.session import DRIVER_OPTIONS, SETTINGS

QUICK_COMPILER = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
QUICK = {DRIVER_OPTIONS: f"{SETTINGS[DRIVER_OPTIONS]} {QUICK_COMPILER}"}
