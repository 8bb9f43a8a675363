"""No form of an address, mistyped ones included, shows its password."""

import pytest

from postroom.core.door import leaving
from postroom.errors import PostroomError, shown_address
from postroom.stores.open import open_store

PLANTED = "Pq7rT-wX2v"

MISTYPED = [
    "postgres://u:%s@h/d",
    "postgres:/u:%s@h/d",
    "postgres//u:%s@h/d",
    "postgres/u:%s@h/d",
    "postgres:u:%s@h/d",
    "postgre://u:%s@h/d",
    "postgre:/u:%s@h/d",
    "postgres:///u:%s@h/d",
    "postgres://:%s@h/d",
    "postgres://u:%s@[::1/d",
    "postgres://u:%s@[::1]:x/d",
    "postgres://u:a@%s@h/d",
    "postgres://u:a/%s@h/d",
    "postgres://u:/%s@h/d",
    "postgres://u:a?%s@h/d",
    "postgres://u:a#%s@h/d",
    "postgres://u:a:%s@h/d",
    "postgresql://u:%s@h:5432,h2:5433/d?sslmode=require",
    "amqp://u:%s@h/?ledger=sqlite:///q.db",
    "amqp://guest:%s@[::1/?ledger=postgres://u:%s@h/d",
    "amqps:/u:%s@h:5671,h2:5671/v?queues=quorum&ledger=postgres://u:%s@h/d",
    "redis://:%s@h:6379/0",
    "rediss//u:%s@h:6379/0",
    "nats://u:%s@h:4222",
    "falkordb://u:%s@h:6379/g",
    "mongodb+srv://u:%s@h/d",
]
UNDERSTOOD = ("postgres://u:%s@h", "postgres://u:a@", "postgres://u:a:", "postgres://:", "postgresql://")
"""The beginnings of those that are right or have one meaning."""
ALONE = [
    "postgres://u:%s",
    "postgres://u:%s/d",
    "postgres://h/d?password=%s",
    "postgres://h/d?user=u&password=%s",
    "postgres://h/d?sslpassword=%s&x=1",
    "nats://%s@h:4222",
    "sc://h:15002/;token=%s",
    "u:%s@h/d",
    "u:a/%s@h/d",
]


@pytest.mark.parametrize("form", [*MISTYPED, *ALONE])
def test_shown_address_has_no_password_and_is_stable(form: str) -> None:
    shown = shown_address(form.replace("%s", PLANTED))
    assert PLANTED not in shown
    assert shown_address(shown) == shown


@pytest.mark.parametrize("form", [one for one in MISTYPED if ":a:" not in one])
@pytest.mark.parametrize("text", ["{}", "there is no store at {}: check the path", "'{}' is not a store"])
def test_text_that_quotes_an_address_leaves_without_the_password(form: str, text: str) -> None:
    left = leaving(text.format(form.replace("%s", PLANTED)))
    assert PLANTED not in left
    assert leaving(left) == left


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgres://app:x@db.internal:5432/postroom?schema=s", "postgres://app@db.internal:5432/postroom?schema=s"),
        ("postgres://app@db/postroom", "postgres://app@db/postroom"),
        ("sqlite:///home/anna@work/queue.db", "sqlite:///home/anna@work/queue.db"),
        ("amqp://app:x@b1,b2/v?ledger=postgres://u:y@h/d", "amqp://app@b1,b2/v?ledger=postgres://u@h/d"),
        ("postgres://[::1]:5432/d", "postgres://[::1]:5432/d"),
        ("postgres://h1:5432,h2:5433/d", "postgres://h1:5432,h2:5433/d"),
        ("s3://bucket/events", "s3://bucket/events"),
        ("memory://", "memory://"),
        ("run/anna@example/data", "run/anna@example/data"),
        ("/srv/data", "/srv/data"),
    ],
)  # fmt: skip
def test_shown_address_keeps_everything_else(address: str, shown: str) -> None:
    assert shown_address(address) == shown


@pytest.mark.parametrize(
    "form",
    [one for one in MISTYPED if not one.startswith(UNDERSTOOD)],
)
def test_opening_a_mistyped_store_is_one_clear_error(form: str) -> None:
    form = form.replace("amqp://u:", "amqp://u:1/")  # so that no server is looked for
    with pytest.raises(PostroomError) as raised:
        open_store(form.replace("%s", PLANTED)).close()
    assert PLANTED not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "see https://host:8080/@scope/pkg",
        "https://cdn.example.com/npm:react@18.2.0",
        "https://[::1]:8800/@me",
        "git@host.example:org/repo",
        "//comment: write to nobody@",
        "postgres://h1:5432,h2:5433/d?application_name=a@b",
    ],
)
def test_text_without_a_password_leaves_unchanged(text: str) -> None:
    assert leaving(text) == text
