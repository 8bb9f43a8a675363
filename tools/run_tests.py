"""`make test`: all tests, those of Spark beside the others.

Most tests wait for processes, sockets and disks, and leave a core to Spark. What the tests of Spark print
comes when the others are done.
"""

import subprocess
import sys
import tempfile

SPARK = "tests/spark"


def main() -> int:
    command = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile() as told:
        spark = subprocess.Popen([*command, SPARK], stdout=told, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*command, f"--ignore={SPARK}"], check=False).returncode
            code = spark.wait()
        finally:
            spark.terminate()
        told.seek(0)
        sys.stdout.buffer.write(told.read())
    return others or code


if __name__ == "__main__":
    sys.exit(main())
