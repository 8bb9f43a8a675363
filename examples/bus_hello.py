"""A log that two handles share: one appends, the other reads from its last position."""

import tempfile
from pathlib import Path

from postroom import Bus


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "messagebus.yaml")
        writer, reader = Bus(path), Bus(path)

        question = writer.append(type="question", project_id="hello", body="Is anybody there?")
        seen = reader.read()
        print("first read:", [message.body for message in seen])

        writer.append_many(
            {"type": "answer", "project_id": "hello", "parents": [question], "body": body}
            for body in ("I am.", "So am I.\n---\nEven with a line of dashes.")
        )
        print("since then:", [message.body for message in reader.read(since_id=seen[-1].msg_id)])
        print("answers:   ", len(reader.query(parent=question)))

        print()
        print(path.read_text(), end="")


if __name__ == "__main__":
    main()
