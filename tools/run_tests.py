"""`make test`: all tests, with the Spark tests beside the others.

Most tests wait for processes, sockets and disks, and leave a core to Spark. The output of the Spark tests is
printed when the others are done.
"""

import subprocess
import sys
import tempfile

SPARK = "tests/spark"


def main() -> int:
    command = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile() as output:
        spark = subprocess.Popen([*command, SPARK], stdout=output, stderr=subprocess.STDOUT)
        try:
            others = subprocess.run([*command, f"--ignore={SPARK}"], check=False).returncode
            code = spark.wait()
        finally:
            spark.terminate()
        output.seek(0)
        sys.stdout.buffer.write(output.read())
    return others or code


if __name__ == "__main__":
    sys.exit(main())
