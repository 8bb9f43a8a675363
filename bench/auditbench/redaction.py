"""The speed of redaction: payloads of 1 kB a second on one core, next to reading and writing the same JSON.

A third of the payloads contain something to redact. The others contain similar-looking text: times, ids,
token counts, hashes, versions, URLs.
"""

import json
import random
from collections.abc import Callable, Iterator

from figures import Figure, Goal, compare, seconds

from postroom.core.redaction import Level, Redactor

PAYLOADS = 2_000
PAYLOAD_BYTES = 1_000
SEED = 7
GOAL_PER_S = 30_000
HEX = "0123456789abcdef"

SENTENCES = (
    "The parser stops at the first empty line of a sample, so the last record is never read.",
    "I compared both branches and the second one is faster on small inputs.",
    "Please check whether the author of the change has seen the failing step.",
    "Retry in 30 seconds; the service answered 503 three times (see the log of 12:41:07).",
    "The table has 1,204 rows and costs about $4.20 a month.",
    "Next: read the file, find the function that is called first, and write a test for it.",
)
SECRETS: tuple[Callable[[random.Random], dict[str, object]], ...] = (
    lambda rng: {"note": f"Write to {hexes(rng, 6)}.smith@example.com when it is done."},
    lambda rng: {"contact": f"call +49 170 {rng.randrange(10**6, 10**7)} before noon"},
    lambda rng: {"request": {"headers": {"Authorization": f"Bearer {hexes(rng, 32)}"}}},
    lambda rng: {"config": {"host": "db", "dbPassword": hexes(rng, 12)}},
    lambda rng: {"error": f"connection to 10.{rng.randrange(256)}.3.17:5432 refused"},
    lambda rng: {"command": f"export API_KEY=sk-proj-{hexes(rng, 40)}"},
    lambda rng: {"payment": {"order": rng.randrange(10**6), "number": "4111 1111 1111 1111"}},
)


def hexes(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(HEX, k=count))


def uuid(rng: random.Random) -> str:
    return "-".join(hexes(rng, count) for count in (8, 4, 4, 4, 12))


def call(rng: random.Random) -> dict[str, object]:
    """One tool call, as agents log it."""
    return {
        "tool": rng.choice(("read_file", "search", "run_tests", "fetch_page")),
        "call_id": uuid(rng),
        "status": "ok",
        "duration_ms": rng.randrange(5_000),
        "args": {"path": f"src/app/module_{rng.randrange(99)}.py", "line": rng.randrange(500)},
    }


def payload(rng: random.Random, *, secret: bool) -> str:
    body: dict[str, object] = {
        "goal_id": uuid(rng),
        "type": "task.result",
        "created_at": f"2026-02-05T14:{rng.randrange(60):02}:52.{rng.randrange(1000):03}Z",
        "created_us": 1_770_000_000_000_000 + rng.randrange(10**12),
        "model": "large-4.5",
        "usage": {"tokens_in": rng.randrange(9_000), "tokens_out": rng.randrange(900), "max_tokens": 4_096},
        "commit": hexes(rng, 40),
        "url": f"https://docs.example.com/v2.1/pages/{rng.randrange(10**6)}",
        "calls": [call(rng), call(rng)],
        "summary": "",
    }
    if secret:
        body |= rng.choice(SECRETS)(rng)
    room = PAYLOAD_BYTES - len(json.dumps(body))
    words = " ".join(rng.choices(SENTENCES, k=room // 70 + 1))
    return json.dumps(body | {"summary": words[:room]})


def payloads() -> list[str]:
    rng = random.Random(SEED)
    return [payload(rng, secret=number % 3 == 0) for number in range(PAYLOADS)]


def run() -> Iterator[Figure]:
    texts = payloads()
    mean_bytes = sum(map(len, texts)) / len(texts)

    def read_and_write() -> float:
        return len(texts) / seconds(lambda: [json.dumps(json.loads(text)) for text in texts])

    def redact(level: Level, key: bytes | None = None) -> Callable[[], float]:
        redactor = Redactor(level, key=key)
        return lambda: len(texts) / seconds(lambda: [redactor.payload(text) for text in texts])

    levels: tuple[tuple[str, Level, bytes | None, tuple[Goal, ...]], ...] = (
        ("redact, medium", "medium", None, (Goal("value", ">=", GOAL_PER_S),)),
        ("redact, medium, with tokens", "medium", b"bench", ()),
        ("redact, full", "full", None, ()),
    )
    for name, level, key, goals in levels:
        found = compare(redact(level, key), read_and_write)
        against = f"json.loads + dumps: {found.theirs:,.0f} payloads/s"
        yield Figure(f"{name} ({mean_bytes:,.0f} B)", found.ours, "payloads/s", against, found.ratio, goals)


if __name__ == "__main__":
    for figure in run():
        print(figure.as_json())
