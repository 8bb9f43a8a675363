"""A hundred secrets in the forms in which programs write them, and ordinary texts that hold none.

Every value is generated from a fixed seed and belongs to nobody. `python -m tests.redactionsecrets` prints
how many are left at the medium level, and which.
"""
# ruff: noqa: E501 - one sample a line

import base64
import json
import random
import string
from typing import NamedTuple

from tests.redactioncorpus import MARKER, survives
from tests.redactionholdout import Either

_RNG = random.Random(69)
_ALNUM = string.ascii_letters + string.digits


def _made(count: int, of: str = _ALNUM) -> str:
    """Random characters, with a digit and letters among the first."""
    first = "a7" + _RNG.choice("bcdef") if of == "0123456789abcdef" else "".join(c for c in "aB7" if c in of)
    return (first + "".join(_RNG.choices(of, k=count)))[:count]


def _hex(count: int) -> str:
    return _made(count, "0123456789abcdef")


def _upper(count: int) -> str:
    return _made(count, string.ascii_uppercase + string.digits)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Secret(NamedTuple):
    """A text with something in it that must not be left."""

    kind: str
    value: str
    text: str


def _secret(kind: str, form: str, value: str) -> Secret:
    return Secret(kind, value, form.replace("@@", value))


_PEM = "\n".join(_made(64) for _ in range(3))
_ESCAPED_PEM = _PEM.replace("\n", "\\n")
_PGP = f"\n{_PEM}\n=aB3d\n"
_BASIC = _base64(f"deploy:{_made(12)}")
_JWT = f"eyJ{_made(30)}.eyJ{_made(40)}.{_made(43)}"

SECRETS: tuple[Secret, ...] = (
    # names of fields
    _secret("field", "passwd: @@", "tulip"),
    _secret("field", "pwd=@@", _made(10)),
    _secret("field", "DB_PASSWORD=@@", _made(12)),
    _secret("field", '{"userPass": "@@"}', _made(9)),
    _secret("field", '{"db_pw": "@@"}', _made(9)),
    _secret("field", '{"db-password": "@@"}', _made(9)),
    _secret("field", '{"DatabasePassword": "@@"}', _made(9)),
    _secret("field", '{"client_secret": "@@"}', _made(30)),
    _secret("field", "client-secret: @@", _made(30)),
    _secret("field", '{"refreshToken": "@@"}', _made(30)),
    _secret("field", "ACCESS_TOKEN=@@", _made(30)),
    _secret("field", "GET /v1/me?access_token=@@&page=2", _made(30)),
    _secret("field", '{"otp": "@@"}', "493817"),
    _secret("field", '{"pin": "@@"}', "8251"),
    _secret("field", "    token: @@", _made(40)),
    _secret("field", '{"pass\\u0077ord": "@@"}', _made(10)),
    _secret("field", '{"body": "{\\"password\\": \\"@@\\"}"}', _made(10)),
    _secret("field", '{"body": "{\\"inner\\": \\"{\\\\\\"password\\\\\\": \\\\\\"@@\\\\\\"}\\"}"}', _made(10)),
    _secret("field", '{"x-api-key": ["@@"]}', _made(24)),
    _secret("field", "spring.datasource.password=@@", _made(12)),
    _secret("field", '<add key="DbPassword" value="@@" />', _made(12)),
    _secret("field", "Server=db;Database=a;User Id=sa;Password=@@;Encrypt=yes", _made(12)),
    _secret("field", '{"passwort": "@@"}', _made(12)),
    _secret("field", '{"contraseña": "@@"}', _made(12)),
    _secret("field", '{"mnemonic": "@@"}', "ripple scissors kick mammal hire column"),
    _secret("field", '{"seed_phrase": "@@"}', "ripple scissors kick mammal hire pony"),
    _secret("field", "session_id=@@; path=/", _hex(32)),
    _secret("field", '{"sessionid": "@@"}', _hex(32)),
    _secret("field", "PHPSESSID=@@", _hex(26)),
    _secret("field", '{"private_key_id": "@@"}', _hex(40)),
    _secret("field", '{"pass": "@@"}', _made(12)),
    _secret("field", "username: bo\npass: @@\n", _made(12)),
    # a name beside its value
    _secret("named", '{"name": "password", "value": "@@"}', _made(9)),
    _secret("named", '[{"key": "API_TOKEN", "value": "@@"}]', _made(9)),
    _secret("named", "- name: REDIS_PASSWORD\n  value: @@\n", _made(9)),
    # command lines
    _secret("command", "mysql --password @@ app", _made(9)),
    _secret("command", "mysql -u root -p@@ app", _made(9)),
    _secret("command", "mysqldump -h db -u root -p'@@' app", _made(9)),
    _secret("command", "sshpass -p @@ ssh host", _made(9)),
    _secret("command", "docker login -u bo -p @@ registry.example.com", _made(9)),
    _secret("command", "curl -u user:@@ https://ci.example.com", _made(9)),
    _secret("command", "curl https://ci.example.com -u user:@@", _made(9)),
    _secret("command", '{"argv": ["curl", "-u", "admin:@@", "https://ci.example.com"]}', _made(9)),
    _secret("command", "redis-cli -h cache -a @@ ping", _made(9)),
    _secret("command", "az login --client-secret @@", _made(20)),
    _secret("command", "helm upgrade --set db.password=@@ app", _made(9)),
    _secret("command", "psql postgresql://app:@@@db/app", _made(9)),
    # addresses
    _secret("address", "postgres://app:@@@db.example.com:5432/app", _made(9)),
    _secret("address", "redis://:@@@cache:6379/0", _made(9)),
    _secret("address", "amqp://guest:@@@mq:5672/%2f", _made(9)),
    _secret("address", "mongodb+srv://app:@@@cluster0.example.net/app", _made(9)),
    _secret("address", "https://x-access-token:@@@github.com/a/b.git", _made(30)),
    _secret("address", "https://@@@o123.ingest.sentry.io/45", _hex(32)),
    # headers
    _secret("header", "Authorization: Basic @@", _BASIC),
    _secret("header", "Authorization: Bearer @@", _made(40)),
    _secret("header", "authorization: Token @@", _hex(40)),
    _secret("header", "Authorization: ApiKey @@", _made(40)),
    _secret("header", "Proxy-Authorization: Basic @@", _BASIC),
    _secret("header", "Cookie: theme=dark; sid=@@", _made(32)),
    _secret("header", "Set-Cookie: sid=@@; HttpOnly", _made(32)),
    _secret("header", "X-Api-Key: @@", _made(32)),
    _secret("header", "X-Auth-Token: @@", _made(32)),
    _secret("header", "curl -H 'PRIVATE-TOKEN: @@' https://gitlab.example.com", _made(20)),
    # blocks
    _secret("block", "-----BEGIN RSA PRIVATE KEY-----\n@@\n-----END RSA PRIVATE KEY-----", _PEM),
    _secret("block", '{"k": "-----BEGIN PRIVATE KEY-----\\n@@\\n-----END PRIVATE KEY-----\\n"}', _ESCAPED_PEM),
    _secret("block", "-----BEGIN OPENSSH PRIVATE KEY-----\n@@\n-----END OPENSSH PRIVATE KEY-----", _PEM),
    _secret("block", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n@@-----END PGP PRIVATE KEY BLOCK-----", _PGP),
    _secret("block", "PuTTY-User-Key-File-3: ssh-rsa\nPrivate-Lines: 3\n@@\nPrivate-MAC: 1f", _PEM),
    _secret("block", "jwt @@ expired", _JWT),
    # keys of vendors
    _secret("vendor", "AWS @@ is disabled", f"AKIA{_upper(16)}"),
    _secret("vendor", "temporary @@", f"ASIA{_upper(16)}"),
    _secret("vendor", "aws_secret_access_key = @@", _made(40)),
    _secret("vendor", '{"SecretAccessKey": "@@"}', _made(40)),
    _secret("vendor", "maps key @@ refused", f"AIza{_made(35)}"),
    _secret("vendor", "google @@ expired", f"ya29.{_made(60)}"),
    _secret("vendor", "remote: @@ denied", f"ghp_{_made(36)}"),
    _secret("vendor", "remote: @@ denied", f"gho_{_made(36)}"),
    _secret("vendor", "remote: @@ denied", f"ghs_{_made(36)}"),
    _secret("vendor", "remote: @@ denied", f"github_pat_{_made(22)}_{_made(59)}"),
    _secret("vendor", "gitlab @@", f"glpat-{_made(20)}"),
    _secret("vendor", "slack @@", f"xoxb-{_made(11, string.digits)}-{_made(24)}"),
    _secret("vendor", "https://hooks.slack.com/services/@@", f"T{_upper(8)}/B{_upper(8)}/{_made(24)}"),
    _secret("vendor", "https://discord.com/api/webhooks/123456789012345678/@@", _made(68)),
    _secret("vendor", "https://acme.webhook.office.com/webhookb2/1a-2b@3c/IncomingWebhook/@@/9f", _hex(32)),
    _secret("vendor", "https://api.telegram.org/bot812345678:@@/getMe", f"AA{_made(33)}"),
    _secret("vendor", "stripe @@", f"sk_live_{_made(24)}"),
    _secret("vendor", "stripe @@", f"rk_live_{_made(24)}"),
    _secret("vendor", "stripe @@", f"whsec_{_made(32)}"),
    _secret("vendor", "sendgrid @@", f"SG.{_made(22)}.{_made(43)}"),
    _secret("vendor", "twilio @@", f"SK{_hex(32)}"),
    _secret("vendor", "twilio auth token: @@", _hex(32)),
    _secret("vendor", "mailgun @@", f"key-{_hex(32)}"),
    _secret("vendor", "mailchimp @@", f"{_hex(32)}-us14"),
    _secret("vendor", "npm @@", f"npm_{_made(36)}"),
    _secret("vendor", "//registry.example.com/:_authToken=@@", _made(36)),
    _secret("vendor", "upload with @@", f"pypi-{_made(80)}"),
    _secret("vendor", '{"auths": {"registry.example.com": {"auth": "@@"}}}', _BASIC),
    _secret("vendor", "openai @@", f"sk-{_made(48)}"),
    _secret("vendor", "openai @@", f"sk-proj-{_made(48)}"),
    _secret("vendor", "anthropic @@", f"sk-ant-api03-{_made(80)}"),
    _secret("vendor", "hub @@", f"hf_{_made(34)}"),
    _secret("vendor", "vault @@ denied", f"hvs.{_made(24)}"),
    _secret("vendor", "doppler @@", f"dp.pt.{_made(43)}"),
    _secret("vendor", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=@@;", _base64(_made(40))),
    _secret("vendor", "SharedAccessSignature=sr=https%3a%2f%2fx&sig=@@&se=1700000000", f"{_made(40)}%3d"),
    _secret("vendor", "https://a.blob.core.windows.net/c/b?sv=2022-11-02&sig=@@", f"{_made(40)}%3D"),
    _secret("vendor", "https://bucket.s3.amazonaws.com/k?X-Amz-Signature=@@", _hex(64)),
    # files
    _secret("file", "machine api.example.com login bo password @@", "tulip-field"),
    _secret("file", "db.example.com:5432:app:bo:@@", _made(12)),
    _secret("file", "*:*:*:bo:@@", _made(12)),
    _secret("file", "bo:@@", f"$apr1${_made(8)}${_made(22)}"),
    _secret("file", "hash @@", f"$2b$12${_made(53)}"),
    _secret("file", "hash @@", f"$argon2id$v=19$m=65536,t=3,p=4${_made(22)}${_made(43)}"),
    _secret("file", "root:@@:19000:0:99999:7:::", f"$6${_made(16)}${_made(86)}"),
    _secret("file", "hash @@", f"pbkdf2_sha256$600000${_made(22)}${_made(43)}="),
    _secret("file", "credentials @@ refused", _BASIC),
)  # fmt: skip

ORDINARY: tuple[str, ...] = (
    "The password reset page has moved.",
    "Click on forgot password, then on reset.",
    "token budget: 500", "tokens: 1234", '{"max_tokens": 4096, "tokens_in": 12}', "tokenizer: cl100k_base",
    "the secret of a good test is a small one", "basic training for new agents", "Basic auth is off.",
    "bearer of bad news", "authorization was refused twice", "authorized users: 12",
    "commit 9fceb02d0ae598e95dc970b74767f19372d61af8", "7d793037-a076-44f0-b0d1-2c1f6b1d6a52",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    "price: $2 a month, $12 a year", "$6 and $25 are cheap", "cost $1$2 in a template", "regex ^a$b$",
    "mkdir -p build/a1", "cp -p a1 b1", "docker run -p 8080:80 nginx:1.25", "ssh -p 2222 host", "nmap -p 1-1024 host",
    "mysql -u root -p app", "pytest -p no:cacheprovider", "ps -a 1", "redis-cli -h cache ping", "git commit -a -m fix7",
    "10:15:30:120", "a:b:c:d:e", "node:5432:ready", "listening on db.example.com:5432", "12:5432:1:2:3",
    "image: registry.example.com/app:1.2.3", "urn:isbn:0451450523", "arn:aws:iam::123456789012:role/app",
    "session closed after 30 s", "session_count=12", "sessions: 4", '{"session": {"started": "10:15"}}',
    '{"pass": true}', '{"pass": 12, "fail": 0}', '{"pass": "yes"}', "pass: 12", "pass: all checks", "passes: 3",
    "SKU SK1234", "SK-1234", "seed: 42", '{"seed": 7}', "hvs.example is a host", "dp.pt is a host", "ya29 is a build",
    "user: bo", "https://example.com/u/bo", "https://example.com:8443/a",
    "Private-Lines are counted", "curl -u https://example.com", "curl https://example.com -o out7",
    "key: value", "primary key: id7", "keyboard: us7", "the key is under the mat", "monkey: 12", "auth: disabled",
)  # fmt: skip


class Found(NamedTuple):
    left: list[Secret]
    false: list[tuple[str, str]]
    """An ordinary text, and what it became."""


def measured() -> Found:
    redactor = Either("medium")
    left = [secret for secret in SECRETS if survives(secret.value, redactor.text(secret.text))]
    false = [(text, after) for text in ORDINARY if MARKER.search(after := redactor.text(text))]
    return Found(left, false)


if __name__ == "__main__":
    found = measured()
    print(
        json.dumps(
            {
                "secrets": len(SECRETS),
                "left": len(found.left),
                "ordinary": len(ORDINARY),
                "false": len(found.false),
            }
        )
    )
    for secret in found.left:
        print(f"{secret.kind}: {secret.text!r} -> {Either('medium').text(secret.text)!r}")
    for before, after in found.false:
        print(f"{before!r} -> {after!r}")
