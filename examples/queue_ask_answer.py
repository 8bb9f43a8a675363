"""One agent asks, another process answers. A question to an agent that does not run gets no answer."""

import multiprocessing
import tempfile

from postroom import Queue


def be_builder(root: str) -> None:
    """Answer one question and exit."""
    queue = Queue(root)
    for message in queue.poll("builder", topics="ask", wait_s=10.0):
        queue.send("answer", "green", to=message["from"], sender="builder", reply_to=message["msg_id"])


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        builder = multiprocessing.get_context("spawn").Process(target=be_builder, args=(root,))
        builder.start()

        queue = Queue(root)
        answer = queue.ask("How is the build?", to="builder", sender="boss", timeout_s=10.0)
        print("builder says:", answer["body"] if answer else None)
        builder.join()

        nobody = queue.ask("And the tests?", to="tester", sender="boss", timeout_s=0.2, ttl_s=0.1)
        print("tester says:", nobody["body"] if nobody else None)

        print("messages:", queue.status("default")["by_topic"])
        print("expired and removed:", queue.expire())


if __name__ == "__main__":
    main()
