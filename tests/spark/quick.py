"""For a JVM of a test. It compiles much and runs little: the quick compiler is enough, if it has the room.

Nor are the classes of Spark verified: to load them is most of what such a JVM does.
"""

from postroom.pipeline.session import DRIVER_OPTIONS, SETTINGS

UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
QUICK_JVM = f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m {UNVERIFIED}"
QUICK = {DRIVER_OPTIONS: f"{SETTINGS[DRIVER_OPTIONS]} {QUICK_JVM}"}
