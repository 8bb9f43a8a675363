"""`python -m postroom.pipeline.declarative FOLDER EVENTS` makes a project for `spark-pipelines run`."""

import sys
from pathlib import Path

from postroom.errors import EXIT_OK, EXIT_USAGE, PostroomError
from postroom.pipeline.declarative import write_project


def main(words: list[str]) -> int:
    match words:
        case [folder, events]:
            try:
                sys.stdout.write(f"{write_project(Path(folder), Path(events))}\n")
            except PostroomError as error:
                sys.stderr.write(f"{error}\n")
                return EXIT_USAGE
            return EXIT_OK
    sys.stderr.write("usage: python -m postroom.pipeline.declarative FOLDER EVENTS\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
