"""For a JVM of a test. It compiles much and runs little: the quick compiler is enough, if it has the room.

Nor are the classes of Spark verified: to load them is most of what such a JVM does.
"""

from postroom.pipeline.spark.session import DRIVER_OPTIONS, SETTINGS, SMALL_SETTINGS

UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
ONE_COLLECTOR = "-XX:-UseParallelGC -XX:+UseSerialGC"  # threads of several would wait for each other
QUICK_JVM = f"-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m {ONE_COLLECTOR} {UNVERIFIED}"
QUICK = {DRIVER_OPTIONS: f"{SETTINGS[DRIVER_OPTIONS]} {QUICK_JVM}"}
UNCOMPILED = {
    name: SMALL_SETTINGS[name] for name in ("spark.sql.codegen.wholeStage", "spark.sql.codegen.factoryMode")
}
"""For plans that run once on few rows."""
