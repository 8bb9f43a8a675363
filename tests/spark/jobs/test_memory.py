"""The memory of a run. A small JVM reads the largest segments that the shipper writes by default."""

import hashlib
import subprocess
import sys
from pathlib import Path

from postroom.audit.layout import segment_name
from postroom.settings import AuditSettings

SEGMENTS = 2  # at the same time
CHILD = """
import sys
from pathlib import Path
from postroom.pipeline.ingest.bronze_writer import hashes_of
from postroom.pipeline.ingest.segments import SegmentStream
from postroom.pipeline.spark.session import spark_session

stream = SegmentStream(Path(sys.argv[1]))
spark = spark_session("local[2]", conf={"spark.driver.memory": "512m"})
print(*hashes_of(spark, stream, stream.segments()).values())
spark.stop()
"""


def test_a_small_heap_takes_the_largest_segments(tmp_path: Path) -> None:
    size = AuditSettings().seal_bytes
    digest = hashlib.sha256(bytes(size)).hexdigest()
    for number in range(1, SEGMENTS + 1):
        file = tmp_path / segment_name(number, digest, 0)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.truncate(size)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (child.returncode, child.stdout.split()) == (0, [digest] * SEGMENTS), child.stderr
