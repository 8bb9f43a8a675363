"""Two workers share a public mailbox, one of them dies, and the results go to a private mailbox."""

import json
import subprocess
import sys
import tempfile

from postroom import Mail


def serve(folder: str) -> "tuple[subprocess.Popen[bytes], str]":
    """A mail server on a free port."""
    words = [sys.executable, "-m", "postroom.cli.main", "mail", "serve", "--data", folder, "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, str(json.loads(process.stdout.readline())["url"])


def coordinate(mail: Mail) -> str:
    """Send jobs to a public mailbox; returns the mailbox for the results."""
    results = mail.create(ttl_s=600)
    mail.create("pages.to.read", public=True, ttl_s=600, desc="summaries wanted")
    for page in range(4):
        mail.send("pages.to.read", {"page": page, "reply_to": results})
    mail.send("pages.to.read", {"page": 99, "reply_to": results}, priority="critical")
    return results


def work(mail: Mail, name: str, *, dies: bool = False) -> int:
    """Do jobs until there are none. A job that is not deleted goes to another worker when this one leaves."""
    done = 0
    with mail.subscribe("pages.to.read", group="readers") as pages:
        while (message := pages.next(timeout_s=1.0)) is not None:
            if dies:
                print(name, "dies with page", message.json()["page"])
                break
            job = message.json()
            mail.send(job["reply_to"], {"page": job["page"], "summary": f"page {job['page']} by {name}"})
            mail.delete("pages.to.read", message.msg_id)
            done += 1
    return done


with tempfile.TemporaryDirectory() as folder:
    server, url = serve(folder)
    try:
        with Mail(url) as mail:
            results = coordinate(mail)
            print("public mailboxes:", [box.mail_id for box in mail.public()])
        with Mail(url) as mail:
            work(mail, "ada", dies=True)
        with Mail(url) as mail:
            print("bob did", work(mail, "bob"))
        with Mail(url) as mail:
            for message in mail.messages(results):
                print(message.json()["summary"])
            assert mail.list("pages.to.read") == []
    finally:
        server.terminate()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
