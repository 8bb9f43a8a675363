"""A seeded corpus of texts with the truth beside them, and how much of it redaction finds.

Each sample is a text with one thing in it: something of a class to take out, or a near miss that has to stay.
`python -m tests.redactioncorpus` prints precision and recall of each class.

Rule 1: what is found counts when no six characters in a row of the planted value are left.
Rule 2: a near miss counts against a class when the marker of that class appears in it. Nothing is drawn again
        because a rule gets it wrong: an order number that happens to be a valid card is a false alarm.
"""

import base64
import random
import re
import string
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from postroom.core.redaction import Redactor, luhn, mod97

SEED = 2026
SAMPLES = 300  # of each kind
VISIBLE_CHARS_MAX = 5
ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
MARKER = re.compile(r"<([a-z]+)(?::[0-9a-f]+)?>")
NONE = ""

Draw = Callable[[random.Random], str]


class Sample(NamedTuple):
    kind: str
    """The class of what is planted; empty for a near miss."""
    planted: str
    text: str
    source: str
    """The generator that made it."""


class Score(NamedTuple):
    found: int
    missed: int
    false: int

    @property
    def recall(self) -> float:
        return self.found / (self.found + self.missed)

    @property
    def precision(self) -> float:
        return self.found / (self.found + self.false)


def chars(rng: random.Random, alphabet: str, low: int, high: int | None = None) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(low, high or low)))


def digits(rng: random.Random, low: int, high: int | None = None) -> str:
    return chars(rng, string.digits, low, high)


def token(rng: random.Random, low: int, high: int | None = None) -> str:
    """Random characters with at least one digit and one letter, as tokens have."""
    return (
        chars(rng, ALNUM, low - 2, (high or low) - 2)
        + rng.choice(string.digits)
        + rng.choice(string.ascii_letters)
    )


# ---- what has to go --------------------------------------------------------------------------------


def email(rng: random.Random) -> str:
    local = rng.choice(
        ("anna", "j.smith", "o'neil"[2:], "first.last+tag", "müller", "x_1", "A.B-C")
    ) + digits(rng, 0, 3)
    host = rng.choice(("example.com", "mail.example.co.uk", "ex-ample.org", "bücher.example.de", "a.io"))
    return f"{local}{rng.choice(('@', '@', '@', '%40'))}{host}"


def phone(rng: random.Random) -> str:
    area, exchange = rng.randint(200, 999), rng.randint(200, 999)
    line = digits(rng, 4)
    return rng.choice(
        (
            f"+49 170 {digits(rng, 7)}",
            f"+44 20 7946 {digits(rng, 4)}",
            f"+1{area}{exchange}{line}",
            f"+1 ({area}) {exchange}-{line}",
            f"({area}) {exchange}-{line}",
            f"{area}-{exchange}-{line}",
            f"{area}.{exchange}.{line}",
            f"1-{area}-{exchange}-{line}",
            f"+33 1 {digits(rng, 2)} {digits(rng, 2)} {digits(rng, 2)} {digits(rng, 2)}",
            f"+86 138 {digits(rng, 4)} {digits(rng, 4)}",
        )
    )


def card(rng: random.Random) -> str:
    prefix, length = rng.choice(
        (
            ("4", 16),
            ("4", 13),
            ("51", 16),
            ("55", 16),
            ("2221", 16),
            ("34", 15),
            ("37", 15),
            ("6011", 16),
            ("3530", 16),
            ("36", 14),
        )
    )
    body = prefix + digits(rng, length - len(prefix) - 1)
    number = next(body + check for check in string.digits if luhn(body + check))
    if length == 16:
        joint = rng.choice(("", " ", "-", ".", "  ", "\u00a0", "\u2011"))
        return joint.join(number[at : at + 4] for at in range(0, 16, 4))
    return rng.choice((number, f"{number[:4]} {number[4:10]} {number[10:]}")) if length == 15 else number


def iban(rng: random.Random) -> str:
    country, bban = rng.choice(
        (
            ("DE", digits(rng, 18)),
            ("GB", "WEST" + digits(rng, 14)),
            ("BE", digits(rng, 12)),
            ("NO", digits(rng, 11)),
            ("FR", digits(rng, 10) + chars(rng, string.ascii_uppercase, 2) + digits(rng, 11)),
            ("MT", "MALT" + digits(rng, 5) + chars(rng, string.ascii_uppercase + string.digits, 18)),
        )
    )
    number = next(f"{country}{n:02}{bban}" for n in range(2, 99) if mod97(f"{country}{n:02}{bban}"))
    return rng.choice((number, " ".join(number[at : at + 4] for at in range(0, len(number), 4))))


def ip(rng: random.Random) -> str:
    four = ".".join(str(rng.randint(0, 255)) for _ in range(4))
    groups = [chars(rng, HEX, 1, 4) for _ in range(8)]
    six = ":".join(groups)
    return rng.choice(
        (
            four,
            four,
            six,
            f"2001:db8::{groups[0]}{digits(rng, 0)}",
            f"fe80::{groups[1]}:{groups[2]}",
            f"::ffff:{four}",
        )
    )


def ssn(rng: random.Random) -> str:
    area = rng.choice((rng.randint(1, 665), rng.randint(667, 899)))
    return f"{area:03}-{rng.randint(1, 99):02}-{rng.randint(1, 9999):04}"


def jwt(rng: random.Random) -> str:
    return ".".join(
        base64.urlsafe_b64encode(part.encode()).decode().rstrip("=")
        for part in ('{"alg":"HS256","typ":"JWT"}', f'{{"sub":"{digits(rng, 8)}"}}', token(rng, 24))
    )


def key(rng: random.Random) -> str:
    return rng.choice(
        (
            lambda: "AKIA" + chars(rng, string.ascii_uppercase + string.digits, 16),
            lambda: rng.choice(("ghp_", "gho_", "ghs_")) + token(rng, 36),
            lambda: f"github_pat_{token(rng, 22)}_{token(rng, 59)}",
            lambda: "sk-" + token(rng, 48),
            lambda: "sk-proj-" + token(rng, 40) + "-" + token(rng, 12),
            lambda: "sk-ant-api03-" + token(rng, 40) + "_" + token(rng, 20),
            lambda: "sk_live_" + token(rng, 24),
            lambda: f"xoxb-{digits(rng, 12)}-{digits(rng, 12)}-{token(rng, 24)}",
            lambda: "AIza" + token(rng, 35),
            lambda: jwt(rng),
            lambda: block(rng),
        )
    )()


def block(rng: random.Random) -> str:
    kind = rng.choice(("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "))
    lines = "\n".join(token(rng, 64) for _ in range(3))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----"


FRAMES = (
    "Please note {} for later.",
    "user said: {}",
    "({})",
    "[{}] done",
    "{}",
    "a,{},b",
    'value "{}" refused',
    "The last one was {}.",
    "first line\n{}\nlast line",
    "see <{}> there",
    "x={}",
    "mailto:{}",
    "tried {}: refused",
    "{}, {}",
    "two\t{}\tcolumns",
    "ist es {}?",
    "«{}»",
    "'{}'",
    "最后是 {} 了",
    "HTTP 401\\n{}\\n",
    "/x?q=%20{}",
)


def secret(rng: random.Random) -> str:
    return token(rng, 8, 24) + rng.choice(("", "!", "$x", "/+", "=="))


ASSIGNMENTS = (
    "password={}",
    "password: {}",
    "DB_PASSWORD='{}'",
    'export API_KEY="{}"',
    '{{"api_key": "{}"}}',
    '{{\\"clientSecret\\": \\"{}\\"}}',
    "Authorization: Bearer {}",
    "curl -H 'X-Api-Key: {}' https://example.com",
    "https://example.com/cb?access_token={}&state=1",
    "https://example.com/x?a=1&sig={}",
    "postgres://app:{}@db.example.internal/main",
    "<password>{}</password>",
    "token = {}",
    "the password is {}",
    "Cookie: session={}; theme=dark",
    "secret_key: {}",
    "pwd={} retries=3",
    "password\t=\t{}",
    "password:\n  {}",
    '{{"password":["{}"]}}',
    "{{'token': b'{}'}}",
)


def assigned(rng: random.Random) -> tuple[str, str]:
    frame = rng.choice(ASSIGNMENTS)
    value = token(rng, 8, 24) if "://" in frame else secret(rng)
    return value, frame.format(value)


# ---- what has to stay ------------------------------------------------------------------------------


def invalid_card(rng: random.Random) -> str:
    body = "4" + digits(rng, 14)
    return next(body + check for check in string.digits if not luhn(body + check))


def uuid(rng: random.Random) -> str:
    return "-".join(chars(rng, HEX, count) for count in (8, 4, 4, 4, 12))


def timestamp(rng: random.Random) -> str:
    day = f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    return rng.choice(
        (
            f"{day}T{clock}Z",
            f"{day} {clock}.{digits(rng, 6)}+01:00",
            f"17{digits(rng, 8)}",
            f"17{digits(rng, 11)}",
            f"17{digits(rng, 14)}",
            clock,
        )
    )


def version(rng: random.Random) -> str:
    parts = [str(rng.randint(0, 30)) for _ in range(4)]
    return rng.choice(
        (
            f"v{'.'.join(parts[:3])}",
            f"version {'.'.join(parts)}",
            f"Chrome/{'.'.join(parts)}",
            f"lodash@{'.'.join(parts[:3])}",
            f"10.0.{rng.randint(10000, 30000)}.1",
            f"{'.'.join(parts[:3])}-rc.1",
        )
    )


def money(rng: random.Random) -> str:
    return rng.choice(
        (
            f"${rng.randint(1, 999)},{digits(rng, 3)},{digits(rng, 3)}.{digits(rng, 2)}",
            f"EUR {digits(rng, 1, 6)}.{digits(rng, 2)}",
            f"{digits(rng, 1, 3)}.{digits(rng, 3)}.{digits(rng, 3)},00",
        )
    )


def isbn(rng: random.Random) -> str:
    return rng.choice(
        (
            f"ISBN 978-3-16-{digits(rng, 6)}-{digits(rng, 1)}",
            f"978{digits(rng, 10)}",
            f"0-306-{digits(rng, 5)}-{digits(rng, 1)}",
        )
    )


def order(rng: random.Random) -> str:
    return rng.choice(
        (
            f"ORD-{digits(rng, 4)}-{digits(rng, 6)}",
            f"#{digits(rng, 8, 16)}",
            f"order {digits(rng, 10, 14)}",
            f"INV{digits(rng, 12)}",
            f"{digits(rng, 3)}-{digits(rng, 7)}-{digits(rng, 7)}",
        )
    )


def digest(rng: random.Random) -> str:
    return rng.choice(
        (
            f"commit {chars(rng, HEX, 40)}",
            chars(rng, HEX, 7),
            f"sha256:{chars(rng, HEX, 64)}",
            f"image@sha256:{chars(rng, HEX, 64)}",
            base64.b64encode(rng.randbytes(24)).decode(),
        )
    )


def words(rng: random.Random) -> str:
    return rng.choice(
        (
            f"max_tokens: {digits(rng, 4)}",
            f"tokens_in={digits(rng, 4)}",
            "invalid token: unexpected end of input",
            "the key is missing",
            "the password is required",
            "secretary of the board",
            "passwordless login",
            "author: Bob",
            "std::vector<int> and abc::def",
            "task-force-management-system-five",
            "risk-adjusted-return-of-2024",
            "git@github.com:example/project.git",
            "@app.route and @scope/package",
            "icon@2x.png",
            "Basic understanding of things",
            "Bearer of bad news",
            f"keyboard {digits(rng, 3)}",
            f"rows 300 400 {digits(rng, 5)}",
            f"aa:bb:cc:{chars(rng, HEX, 2)}:{chars(rng, HEX, 2)}:01",
            f"pi is 3.{digits(rng, 15)}",
            f"range 100-200-{digits(rng, 4)}",
            f"UTF16 SHA256 ISO8601 RFC{digits(rng, 4)}",
            f"https://example.com/page?id={digits(rng, 6)}&sort=key",
            f"{digits(rng, 2)}/{digits(rng, 2)}/{digits(rng, 4)}",
        )
    )


PLANTED: dict[str, Draw] = {
    "email": email,
    "phone": phone,
    "card": card,
    "iban": iban,
    "ip": ip,
    "ssn": ssn,
    "key": key,
}
NEAR_MISSES: tuple[Draw, ...] = (invalid_card, uuid, timestamp, version, money, isbn, order, digest, words)
CLASSES = (*PLANTED, "redacted")


def corpus(seed: int = SEED, samples: int = SAMPLES) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for kind, draw in PLANTED.items():
        for _ in range(samples):
            value = draw(rng)
            made.append(Sample(kind, value, rng.choice(FRAMES).replace("{}", value), kind))
    for _ in range(samples):
        value, text = assigned(rng)
        made.append(Sample("redacted", value, rng.choice(FRAMES[:2]).format(text), "assigned"))
    for draw in NEAR_MISSES:
        for _ in range(samples):
            value = draw(rng)
            made.append(Sample(NONE, value, rng.choice(FRAMES).replace("{}", value), draw.__name__))
    return made


def survives(secret: str, text: str) -> bool:
    """Whether more of a secret is left than may be."""
    length = min(len(secret), VISIBLE_CHARS_MAX + 1)
    return any(secret[at : at + length] in text for at in range(len(secret) - length + 1))


def misses(samples: list[Sample], redactor: Redactor) -> list[tuple[Sample, str]]:
    """What goes wrong, to be looked at."""
    wrong = []
    for sample in samples:
        redacted = redactor.text(sample.text)
        if (redacted != sample.text) if sample.kind == NONE else survives(sample.planted, redacted):
            wrong.append((sample, redacted))
    return wrong


def measure(samples: list[Sample], redactor: Redactor) -> dict[str, Score]:
    found: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    false: Counter[str] = Counter()
    for sample in samples:
        redacted = redactor.text(sample.text)
        if sample.kind != NONE:
            (missed if survives(sample.planted, redacted) else found)[sample.kind] += 1
        else:
            false.update({match[1] for match in MARKER.finditer(redacted)} - {None})
    return {kind: Score(found[kind], missed[kind], false[kind]) for kind in CLASSES}


def report(scores: dict[str, Score]) -> str:
    rows = [f"{'class':<10}{'recall':>8}{'precision':>11}{'found':>7}{'missed':>8}{'false':>7}"]
    rows += [
        f"{kind:<10}{score.recall:>8.3f}{score.precision:>11.3f}{score.found:>7}{score.missed:>8}{score.false:>7}"
        for kind, score in scores.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    seed = int(sys.argv[1]) if sys.argv[1:] else SEED
    print(report(measure(corpus(seed), Redactor("medium"))))
