"""The script of the screenshots takes a picture."""

import subprocess
import sys
from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_script_takes_the_picture_of_a_view(tmp_path: Path) -> None:
    command = [sys.executable, "tools/screenshots.py", "--out", str(tmp_path / "page"), "buses"]
    subprocess.run(command, check=True, capture_output=True)
    [picture] = (tmp_path / "page").iterdir()
    assert picture.name == "buses.png"
    assert picture.read_bytes().startswith(PNG)
