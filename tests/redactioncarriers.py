"""Secrets in the carriers in which they leave programs, and harmless texts, to measure redaction.

The texts were written before the rules that they measure. Whoever mends a rule mends a class of secrets, and
does not look at single entries. Every value comes from a fixed seed and belongs to nobody.
`python -m tests.redactioncarriers` prints how many secrets are left at each level, and which.

Rule 1: a secret counts as left when six characters in a row of it are in the redacted text or payload.
Rule 2: Base64 is opened at the full level only, so `ENCODED` counts only there.
"""
# ruff: noqa: E501 - one sample a line

import base64
import json
import random
import string
from typing import NamedTuple
from urllib.parse import quote

from postroom.core.redaction import Level, Redactor
from tests.redactioncorpus import MARKER, survives

_RNG = random.Random(2027)
_ALNUM = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"
_URLSAFE = _ALNUM + "-_"


def _made(count: int, of: str = _ALNUM) -> str:
    """Random characters, with a digit, a capital and a small letter where `of` has them."""
    kinds = [string.digits, string.ascii_uppercase, string.ascii_lowercase]
    first = "".join(_RNG.choice(found) for kind in kinds if (found := [char for char in kind if char in of]))
    made = list((first + "".join(_RNG.choices(of, k=count)))[:count])
    _RNG.shuffle(made)
    return "".join(made)


def _hex(count: int) -> str:
    return _made(count, _HEX)


def _upper(count: int) -> str:
    return _made(count, string.ascii_uppercase + string.digits)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _pw() -> str:
    """A password as a generator of passwords makes it."""
    return f"{_made(5)}-{_made(6)}"


class Secret(NamedTuple):
    """A text with something in it that must not be left."""

    carrier: str
    value: str
    text: str


def _secret(carrier: str, form: str, value: str) -> Secret:
    return Secret(carrier, value, form.replace("@@", value))


_PEM = "\n".join(_made(64, _ALNUM + "+/") for _ in range(4))
_PEM_ESCAPED = _PEM.replace("\n", "\\n")
_JWT = f"eyJ{_made(33)}.eyJ{_made(52)}.{_made(43, _URLSAFE)}"
_GITHUB, _GITLAB, _AWS = f"ghp_{_made(36)}", f"glpat-{_made(20)}", f"AKIA{_upper(16)}"
_OPENAI = f"sk-proj-{_made(48)}"
_AWS_SECRET = _made(40, _ALNUM + "/+")
_BASIC = _b64(f"deploy:{_made(14)}")

SECRETS: tuple[Secret, ...] = (
    # JSON: members, names beside values, pairs in lists, JSON in JSON
    _secret("json", '{"password": "@@"}', _pw()),
    _secret("json", '{"user": "bo", "db": {"userPassword": "@@", "port": 5432}}', _pw()),
    _secret("json", '{"api_key":"@@","n":1}', _made(32)),
    _secret("json", '{"clientSecret": "@@"}', _made(34)),
    _secret("json", '{"wifi": {"ssid": "office", "psk": "@@"}}', _pw()),
    _secret("json", '{"type": "service_account", "private_key_id": "@@", "client_id": "1"}', _hex(40)),
    _secret("json", f'{{"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\\n{_PEM_ESCAPED}\\n-----END PRIVATE KEY-----\\n"}}', _PEM_ESCAPED)._replace(value=_PEM[:64]),
    _secret("json", '{"AccessKeyId": "ASIA@@", "Expiration": "2026-05-01T10:00:00Z"}', _upper(16)),
    _secret("json", '{"Credentials": {"SecretAccessKey": "@@"}}', _AWS_SECRET),
    _secret("json", '{"Credentials": {"SessionToken": "@@"}}', _made(120, _ALNUM + "/+")),
    _secret("json", '{"sessionId": "@@"}', _hex(32)),
    _secret("json", '{"mfa": {"otp": "@@"}}', "830174"),
    _secret("json", '{"token_type": "bearer", "access_token": "@@", "expires_in": 3600}', _made(64)),
    _secret("json", '{"keystore": {"storePass": "@@"}}', _pw()),
    _secret("json", '{"webhook": {"signing_secret": "@@"}}', _hex(32)),
    _secret("pair", '[["X-Api-Key", "@@"]]', _made(32)),
    _secret("pair", '{"headers": [["Host", "api.example.com"], ["Authorization", "Bearer @@"]]}', _made(40)),
    _secret("pair", '{"headers": [["accept", "*/*"], ["x-auth-token", "@@"]]}', _made(24)),
    _secret("pair", '{"env": [["HOME", "/root"], ["DB_PASSWORD", "@@"]]}', _pw()),
    _secret("pair", '[["cookie", "sid=@@"]]', _made(32)),
    _secret("pair", '{"params": [["page", "2"], ["api_key", "@@"], ["sort", "asc"]]}', _made(28)),
    _secret("pair", '{"rawHeaders": ["Host", "x.example", "X-Api-Key", "@@", "Accept", "*/*"]}', _made(28)),
    _secret("pair", "headers=[('host', 'api.example.com'), ('x-api-key', '@@')]", _made(32)),
    _secret("pair", "raw headers [(b'host', b'x.example'), (b'authorization', b'Bearer @@')]", _made(40)),
    _secret("pair", "Headers({'host': 'x', 'x-api-key': '@@'})", _made(32)),
    _secret("pair", 'sent [["X-Api-Key","@@"],["Accept","*/*"]] and got 401', _made(32)),
    _secret("pair", '{"log": "sent [[\\"X-Api-Key\\", \\"@@\\"]]"}', _made(32)),
    _secret("pair", "dict_items([('user', 'bo'), ('password', '@@')])", _pw()),
    _secret("named", '{"name": "DB_PASSWORD", "value": "@@"}', _pw()),
    _secret("named", '{"env": [{"name": "API_TOKEN", "value": "@@"}]}', _made(20)),
    _secret("named", '{"Name": "/prod/db/password", "Type": "SecureString", "Value": "@@"}', _pw()),
    _secret("named", '{"key": "client_secret", "value": "@@", "enabled": true}', _made(30)),
    _secret("nested", '{"body": "{\\"password\\": \\"@@\\"}"}', _pw()),
    _secret("nested", '{"stdout": "line\\nexport TOKEN=@@\\nend"}', _made(24)),
    _secret("nested", '{"a": "{\\"b\\": \\"{\\\\\\"api_key\\\\\\": \\\\\\"@@\\\\\\"}\\"}"}', _made(24)),
    # headers
    _secret("header", "Authorization: Bearer @@", _made(48, _URLSAFE)),
    _secret("header", "Authorization: Basic @@", _BASIC),
    _secret("header", "Proxy-Authorization: Basic @@", _b64(f"proxy:{_made(10)}")),
    _secret("header", "authorization: token @@", _hex(40)),
    _secret("header", 'Authorization: Digest username="bo", response="@@"', _hex(32)),
    _secret("header", "X-API-KEY: @@", _made(32)),
    _secret("header", "> x-goog-api-key: @@", _made(39)),
    _secret("header", "PRIVATE-TOKEN: @@", _made(20)),
    _secret("header", "X-Vault-Token: @@", _made(26)),
    _secret("header", "Cookie: theme=dark; session=@@", _made(40)),
    _secret("header", "Set-Cookie: sid=@@; Path=/; HttpOnly", _made(40)),
    _secret("header", "X-Amz-Security-Token: @@", _made(100, _ALNUM + "/+")),
    _secret("header", "Ocp-Apim-Subscription-Key: @@", _hex(32)),
    _secret("header", "X-Auth-Key: @@", _hex(37)),
    # addresses and query strings
    _secret("url", "postgres://app:@@@db.example.com:5432/app", _pw()),
    _secret("url", "connecting to mongodb+srv://svc:@@@cluster0.example.net/app?retryWrites=true", _pw()),
    _secret("url", "redis://:@@@cache.example.com:6379/0", _pw()),
    _secret("url", "amqps://svc:@@@mq.example.com:5671/%2F", _pw()),
    _secret("url", "https://bo:@@@git.example.com/a/b.git", _pw()),
    _secret("url", "fatal: unable to access 'https://oauth2:@@@git.example.com/a.git/': 403", _made(20)),
    _secret("url", "https://@@@git.example.com/a/b.git", _GITHUB),
    _secret("url", "GET /v1/items?api_key=@@&page=2 HTTP/1.1", _made(30)),
    _secret("url", "https://api.example.com/cb#access_token=@@&token_type=bearer", _made(44)),
    _secret("url", "https://b.s3.example.com/k?X-Amz-Credential=x&X-Amz-Signature=@@", _hex(64)),
    _secret("url", "https://a.blob.example.net/c?sv=2024-01-01&sig=@@", f"{_made(42)}%3D"),
    _secret("url", "https://hooks.slack.com/services/@@", f"T{_upper(8)}/B{_upper(8)}/{_made(24)}"),
    _secret("url", "https://discord.com/api/webhooks/112233445566778899/@@", _made(68, _URLSAFE)),
    _secret("url", "otpauth://totp/acme:bo?secret=@@&issuer=acme", _made(32, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")),
    _secret("url", "jdbc:postgresql://db/app?user=bo&password=@@", _pw()),
    _secret("url", "jdbc:sqlserver://db:1433;user=sa;password=@@;encrypt=true", _pw()),
    _secret("url", "wss://stream.example.com/ws?token=@@", _made(32)),
    _secret("percent", "/login?next=%2Fhome%3Fpassword%3D@@%26user%3Dbo", _made(14)),
    _secret("percent", "body=%7B%22password%22%3A%22@@%22%7D", _made(14)),
    _secret("percent", "payload=%7B%22user%22%3A%22bo%22%2C%22api_key%22%3A%20%22@@%22%7D", _made(28)),
    _secret("percent", "redirect=https%3A%2F%2Fapp%3A@@%40db.example.com%2Fx", _made(12)),
    _secret("percent", "GET /r?u=https%3A%2F%2Fx.example%2F%3Faccess_token%3D@@%26a%3D1", _made(30)),
    _secret("percent", "dsn=postgres%3A%2F%2Fapp%3A@@%40db%3A5432%2Fapp", _made(16)),
    _secret("percent", "x=%0A@@%0A", _GITHUB),
    _secret("percent", "header=Authorization%3A%20Bearer%20@@", _made(40)),
    _secret("percent", "q=card%20@@", "4539%201488%200343%206467"),
    _secret("percent", "a=%22X-Api-Key%22%2C%20%22@@%22", _made(28)),
    # command lines: argv in JSON and in Python, and shells
    _secret("argv", '["curl", "-u", "bo:@@", "https://ci.example.com"]', _pw()),
    _secret("argv", '{"cmd": ["curl", "-s", "-u", "bo:@@"]}', _pw()),
    _secret("argv", '{"argv": ["/usr/bin/curl", "https://x.example", "--user", "bo:@@"]}', _pw()),
    _secret("argv", "subprocess failed: ['curl', '-u', 'bo:@@', 'https://ci.example.com']", _pw()),
    _secret("argv", "Command '['curl', '-sS', '--user', 'bo:@@']' returned non-zero exit status 22.", _pw()),
    _secret("argv", '["az", "login", "--service-principal", "--client-secret", "@@"]', _made(34)),
    _secret("argv", '{"args": ["--db-password", "@@", "--verbose"]}', _pw()),
    _secret("argv", "argv: ['deploy', '--token', '@@']", _made(24)),
    _secret("argv", '["mysql", "-uroot", "-p@@", "app"]', _pw()),
    _secret("argv", '["sshpass", "-p", "@@", "ssh", "host"]', _pw()),
    _secret("argv", '["docker", "login", "-u", "bo", "-p", "@@", "reg.example.com"]', _pw()),
    _secret("argv", '["curl", "-H", "Authorization: Bearer @@", "https://x.example"]', _made(40)),
    _secret("argv", '["curl", "-H", "X-Api-Key: @@"]', _made(32)),
    _secret("argv", '["redis-cli", "-a", "@@", "ping"]', _pw()),
    _secret("argv", "execve('/usr/bin/psql', ['psql', 'postgres://app:@@@db/app'])", _pw()),
    _secret("shell", "$ curl -u bo:@@ https://ci.example.com", _pw()),
    _secret("shell", "+ curl -fsS --user bo:@@ -o out.json ci.example.com/job", _pw()),
    _secret("shell", "az login --client-secret @@ --tenant t1", _made(34)),
    _secret("shell", "az login --client-secret=@@", _made(34)),
    _secret("shell", "mysql -h db -u root -p@@ app", _pw()),
    _secret("shell", "PGPASSWORD=@@ psql -h db app", _pw()),
    _secret("shell", "export OPENAI_API_KEY=@@", _OPENAI),
    _secret("shell", "deploy --api-key '@@' --region eu", _made(30)),
    _secret("shell", "redis-cli -h cache -a @@ info", _pw()),
    _secret("shell", "sshpass -p '@@' scp a host:", _pw()),
    _secret("shell", "echo @@ | docker login --username bo --password-stdin", f"dckr_pat_{_made(27)}"),
    _secret("shell", "helm upgrade app . --set db.password=@@ --set n=1", _pw()),
    _secret("shell", "kubectl create secret generic s --from-literal=password=@@", _pw()),
    _secret("shell", "openssl pkcs12 -in a.p12 -passin pass:@@", _pw()),
    _secret("shell", "git clone https://x-access-token:@@@git.example.com/a.git", _made(36)),
    _secret("shell", "wget --http-user bo --http-password @@ https://x.example/f", _pw()),
    _secret("shell", "restic --password-command x; ansible-vault --vault-pass @@", _pw()),
    # environment files, INI, properties, TOML, YAML, XML
    _secret("env", "DB_HOST=db\nDB_PASSWORD=@@\nDB_PORT=5432", _pw()),
    _secret("env", "AWS_SECRET_ACCESS_KEY=@@", _AWS_SECRET),
    _secret("env", 'STRIPE_KEY="@@"', f"rk_live_{_made(24)}"),
    _secret("env", "SESSION_SECRET='@@'", _hex(64)),
    _secret("env", "WIFI_PSK=@@", _pw()),
    _secret("env", "NPM_TOKEN=@@", f"npm_{_made(36)}"),
    _secret("env", "environ({'HOME': '/root', 'SMTP_PASS': '@@'})", _pw()),
    _secret("env", "ENCRYPTION_KEY=@@", _b64(_made(24))),
    _secret("env", "REDIS_AUTH=@@", _pw()),
    _secret("ini", "[client]\nuser = bo\npassword = @@\n", _pw()),
    _secret("ini", "aws_access_key_id = x\naws_secret_access_key = @@\n", _AWS_SECRET),
    _secret("ini", "[Interface]\nAddress = 10.0.0.2/24\nPrivateKey = @@\n", f"{_made(43, _ALNUM + '+/')}="),
    _secret("ini", "[Peer]\nPresharedKey = @@\n", f"{_made(43, _ALNUM + '+/')}="),
    _secret("ini", 'network={\n  ssid="office"\n  psk="@@"\n}', _pw()),
    _secret("ini", "spring.datasource.password=@@", _pw()),
    _secret("ini", "[registry]\ntoken = '@@'", _made(32)),
    _secret("yaml", "db:\n  user: bo\n  password: @@\n", _pw()),
    _secret("yaml", "env:\n  - name: API_KEY\n    value: @@\n", _made(28)),
    _secret("yaml", "kind: Secret\ndata:\n  token: @@\n", _b64(_made(24))),
    _secret("yaml", "users:\n- name: admin\n  user:\n    client-key-data: @@\n", _b64(_made(60))),
    _secret("yaml", "wifis:\n  wlan0:\n    access-points:\n      office:\n        psk: @@\n", _pw()),
    _secret("yaml", "private_key: |\n  @@\n  more\n", _made(60)),
    _secret("yaml", "smtp: {host: mail, password: @@, port: 25}", _pw()),
    _secret("yaml", "webhooks:\n  - secret: '@@'\n", _made(24)),
    _secret("xml", "<connection><user>bo</user><password>@@</password></connection>", _pw()),
    _secret("xml", '<add key="ApiKey" value="@@" />', _made(24)),
    _secret("xml", '<server id="x" password="@@"/>', _pw()),
    _secret("xml", "<property name='password' value='@@'/>", _pw()),
    # files of programs
    _secret("file", "db.example.com:5432:app:bo:@@", _pw()),
    _secret("file", "*:*:*:bo:@@", _pw()),
    _secret("file", "localhost:5432:*:postgres:@@\n# comment\n", _pw()),
    _secret("file", "10.0.0.7:5433:app:svc:@@", _pw()),
    _secret("file", "machine api.example.com login bo password @@", _pw()),
    _secret("file", "machine api.example.com\n  login bo\n  password @@\n", _pw()),
    _secret("file", "//reg.example.com/:_authToken=@@", _made(36)),
    _secret("file", '{"auths": {"reg.example.com": {"auth": "@@"}}}', _BASIC),
    _secret("file", "bo:@@:19000:0:99999:7:::", f"$6${_made(16)}${_made(86, _ALNUM + './')}"),
    _secret("file", "admin:@@", f"$2y$10${_made(53, _ALNUM + './')}"),
    _secret("file", "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n@@\nPrivate-MAC: 0a", _made(48, _ALNUM + "+/")),
    _secret("pem", "-----BEGIN RSA PRIVATE KEY-----\n@@\n-----END RSA PRIVATE KEY-----", _PEM),
    _secret("pem", "-----BEGIN OPENSSH PRIVATE KEY-----\n@@\n-----END OPENSSH PRIVATE KEY-----", _PEM),
    _secret("pem", "key='-----BEGIN EC PRIVATE KEY-----\\n@@\\n-----END EC PRIVATE KEY-----\\n'", _PEM_ESCAPED),
    _secret("pem", "cert -----BEGIN ENCRYPTED PRIVATE KEY----- @@", _PEM[:64]),
    # Python: reprs, tracebacks, logs
    _secret("repr", "Config(host='db', password='@@', port=5432)", _pw()),
    _secret("repr", "Settings(api_key=SecretStr('@@'))", _made(30)),
    _secret("repr", "{'Authorization': 'Bearer @@'}", _made(40)),
    _secret("repr", "<Request [POST] headers={'x-api-key': b'@@'}>", _made(32)),
    _secret("repr", "call(token='@@', retries=3)", _made(32)),
    _secret("repr", "Namespace(user='bo', client_secret='@@')", _made(30)),
    _secret("repr", "namedtuple: Login(user='bo', pwd='@@')", _pw()),
    _secret("traceback", 'Traceback (most recent call last):\n  File "a.py", line 3, in run\n    connect(password="@@")\nOSError: refused', _pw()),
    _secret("traceback", "psycopg.OperationalError: connection to 'postgres://app:@@@db/app' failed", _pw()),
    _secret("traceback", "requests.exceptions.HTTPError: 401 for url: https://x.example/v1?key=@@", _made(39)),
    _secret("traceback", "KeyError: '@@'", _GITLAB),
    _secret("traceback", "ValueError: invalid literal for int() with base 10: '@@'", _OPENAI),
    _secret("traceback", "httpx.HTTPStatusError: 401 for headers [('x-api-key', '@@')]", _made(32)),
    _secret("log", "2026-05-01T10:00:00Z WARN auth failed user=bo password=@@ ip=10.0.0.1", _pw()),
    _secret("log", 'level=error msg="login failed" token="@@"', _made(24)),
    _secret("log", "I0501 10:00:00.000000 1 main.go:3] token: @@", _made(32)),
    _secret("log", "[debug] sending Bearer @@ to api", _made(40)),
    _secret("log", "the password is @@", _pw()),
    _secret("log", "using api key @@ for eu", _made(32)),
    _secret("log", "sql: ALTER USER bo WITH PASSWORD '@@'", _pw()),
    _secret("log", "sql: CREATE USER bo IDENTIFIED BY '@@'", _pw()),
    _secret("log", "<- PASS @@", _pw()),
    _secret("log", "AUTH default @@ -> WRONGPASS", _pw()),
    # keys with a form of their own
    _secret("key", "aws @@ is disabled", _AWS),
    _secret("key", "google @@ expired", f"ya29.{_made(80, _URLSAFE)}"),
    _secret("key", '{"note": "@@"}', f"ya29.a0{_made(60, _URLSAFE)}"),
    _secret("key", "vault: denied @@", f"hvs.{_made(90, _URLSAFE)}"),
    _secret("key", "vault batch @@", f"hvb.{_made(100, _URLSAFE)}"),
    _secret("key", "maps AIza@@ refused", _made(35, _URLSAFE)),
    _secret("key", "gh @@ bad credentials", f"github_pat_{_made(22)}_{_made(59)}"),
    _secret("key", "gl @@", f"glpat-{_made(20)}"),
    _secret("key", "slack @@", f"xoxb-{_made(12, string.digits)}-{_made(12, string.digits)}-{_made(24)}"),
    _secret("key", "stripe @@", f"sk_live_{_made(99)}"),
    _secret("key", "anthropic @@", f"sk-ant-api03-{_made(93, _URLSAFE)}"),
    _secret("key", "hub @@", f"hf_{_made(34)}"),
    _secret("key", "do @@", f"dop_v1_{_hex(64)}"),
    _secret("key", "sendgrid @@", f"SG.{_made(22, _URLSAFE)}.{_made(43, _URLSAFE)}"),
    _secret("key", "bot 812345679:@@ blocked", f"AA{_made(33, _URLSAFE)}"),
    _secret("key", "azure @@", f"{_made(3)}8Q~{_made(34)}"),
    _secret("key", "mailchimp @@", f"{_hex(32)}-us7"),
    _secret("key", "sentry @@", f"sntrys_{_made(60)}"),
    _secret("key", "replicate @@", f"r8_{_made(37)}"),
    _secret("key", "perplexity @@", f"pplx-{_made(48)}"),
    _secret("key", "brevo @@", f"xkeysib-{_hex(64)}-{_made(16)}"),
    _secret("key", "heroku @@", f"HRKU-{_made(60, _URLSAFE)}"),
    _secret("key", "buildkite @@", f"bkua_{_hex(40)}"),
    _secret("key", "langsmith @@", f"lsv2_pt_{_hex(32)}_{_hex(10)}"),
    _secret("key", "terraform @@", f"{_made(14)}.atlasv1.{_made(67)}"),
    _secret("key", "dropbox @@", f"sl.{_made(130, _URLSAFE)}"),
    _secret("key", "fb @@", f"EAAC{_made(120)}"),
    _secret("key", "age @@", f"AGE-SECRET-KEY-1{_made(58, string.ascii_uppercase + string.digits)}"),
    _secret("jwt", "jwt @@ expired", _JWT),
    _secret("jwt", '{"event": "login", "detail": "@@"}', _JWT),
    # numbers
    _secret("number", "card 4539 1488 0343 6467 declined", "4539 1488 0343 6467"),
    _secret("number", "card 4539-1488-0343-6467 declined", "4539-1488-0343-6467"),
    _secret("number", "pan=4 5 3 9 1 4 8 8 0 3 4 3 6 4 6 7", "4 5 3 9 1 4 8 8 0 3 4 3 6 4 6 7"),
    _secret("number", "45 39 14 88 03 43 64 67 declined", "45 39 14 88 03 43 64 67"),
    _secret("number", '{"n": "4539-148803-436467"}', "4539-148803-436467"),
    _secret("number", "453914 8803436467", "453914 8803436467"),
    _secret("number", "amex 3782 822463 10005", "3782 822463 10005"),
    _secret("number", "iban de89370400440532013000", "de89370400440532013000"),
    _secret("number", "iban de89 3704 0044 0532 0130 00 please", "de89 3704 0044 0532 0130 00"),
    _secret("number", "IBAN: DE89-3704-0044-0532-0130-00", "DE89-3704-0044-0532-0130-00"),
    _secret("number", "to gb29 nwbk 6016 1331 9268 19", "gb29 nwbk 6016 1331 9268 19"),
    _secret("number", "Gb29Nwbk60161331926819", "Gb29Nwbk60161331926819"),
    _secret("number", "DE 89 3704 0044 0532 0130 00", "3704 0044 0532 0130 00"),
    _secret("number", "social security 123 45 6789", "123 45 6789"),
)  # fmt: skip

ENCODED: tuple[Secret, ...] = (
    _secret("base64", "blob @@ here", _b64(f"token {_GITHUB}")),
    _secret("base64", "config: @@", _b64(json.dumps({"password": _pw()}))),
    _secret("base64", "data=@@", _b64(f"export AWS_SECRET_ACCESS_KEY={_AWS_SECRET}\n")),
    _secret("base64", "state @@", base64.urlsafe_b64encode(f'{{"k":"{_OPENAI}"}}'.encode()).decode().rstrip("=")),
    _secret("base64", "key @@", _b64(f"-----BEGIN RSA PRIVATE KEY-----\n{_PEM}")),
    _secret("base64", "pull secret @@", _b64(json.dumps({"auths": {"reg.example.com": {"auth": _BASIC}}}))),
    _secret("base64", "sent @@ to 2 places", _b64("card 4539 1488 0343 6467 of bo@example.com")),
    _secret("base64", "twice @@", _b64(_b64(f"password={_pw()} user=bo"))),
    _secret("base64", "url @@", _b64(f"postgres://app:{_made(12)}@db.example.com/app")),
    _secret("base64", "q=@@&x=1", quote(_b64(f'{{"api_key": "{_made(30)}"}}'), safe="")),
    _secret("base64", "credentials @@ refused", _b64(f"deploy:{_AWS}")),
)  # fmt: skip

HARMLESS: tuple[str, ...] = (
    # ids and hashes
    "7d793037-a076-44f0-b0d1-2c1f6b1d6a52", "id=0b7e1c52-64a0-4d9f-9d0c-0a6d8f6e2b11 done",
    '{"goal_id": "3f2b8c1e-9d4a-4b6f-8e7a-1c2d3e4f5a6b"}', "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
    "HEAD is now at 7f82d65 Redact logs", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    'etag "33a64df551425fcc55e4d42a148795d9f25f89d4"', "md5 d41d8cd98f00b204e9800998ecf8427e", "crc32 0xcbf43926",
    '{"sha": "da39a3ee5e6b4b0d3255bfef95601890afd80709", "n": 1}', "01HZX3V8Q2M4T6W8Y0A2C4E6G8 is a ulid",
    "trace 4bf92f3577b34da6a3ce929d0e0e4736 span 00f067aa0ba902b7", "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "toolu_01A09q90qw90lq917835lq9 returned", "chatcmpl-9abcDEF0123456789ghiJKL done", "call_9hT2mQ7vXcR4bN8kLpZ3wY1s finished",
    "msg_013Zva2CMHLNnjNJJKqJ2EF stopped", "arn:aws:iam::123456789012:role/deploy", "vpc-0a1b2c3d4e5f67890 i-0abcd1234efgh5678",
    "docker pull reg.example.com/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "ssh-ed25519 fingerprint SHA256:uNiVztksCsDhcc0u9e8BrqXVZ6i5lGQDEpFhIeGLl3s", 'etag W/"5e1f-18c2a"',
    "integrity sha512-Q2bFTOhEALkN8hOms2FKTDLy7eugP2zFZ1T8LCvX42Fp3WoNr3bjZSAHeOsHrbV1Fu9/A0EzCinRE7Af1ofPrw==",
    # times, numbers, versions
    "2026-05-01T10:00:00.123456Z", "at 10:15:30.250 on 2026-05-01", "epoch 1770000000, ms 1770000000123", "took 00:01:12",
    "1.2.3-rc.1+build.5", "python 3.11.9, openssl 3.0.13", "kernel 6.1.0-21-amd64", "Chrome/124.0.6367.91 Safari/537.36",
    "rows 12 345 678 of 90 000 000", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16", "0 1 1 2 3 5 8 13 21 34 55 89 144 233",
    "10 20 30 40 50 60 70 80", "scores 45 12 99 31 27 64 18 77", "matrix [[1, 2, 3], [4, 5, 6], [7, 8, 9]]",
    "2026-05-01 2026-05-02 2026-05-03", "2024-2025-2026", "p50 12 ms p95 48 ms p99 112 ms", "ratio 3.14159265358979",
    "chr1:1000000-2000000", "pages 1000-1200, 1300-1400", "lat 52.520008 lon 13.404954", "order 4111 of 1234 5678",
    "EAN 4006381333931", "ISBN 978-0-13-468599-1", "part 1234-567890-1234", "8 16 32 64 128 256 512 1024 2048 4096",
    "bytes 0000 1111 2222 3333 4444 5555 6666 7777", "de12 is a seat", "no 12 of 2026 was the best one", "be20 5mm bolts and it15 6mm nuts",
    "at 20 past 5 we had 1200 2400 3600 rows", "is 12 more than 1000 2000 3000 4000 rows", "mt 42 route, es 15 km, se 20 km",
    # sentences about secrets
    "The token has expired, please sign in again.", "Please enter your password to continue.", "A secret is read from the vault at start.",
    "your password must have at least 12 characters", "the api key is missing in the request", "invalid credentials for user bo",
    "Use --password-stdin to read the password.", "the option --token takes a name", "pass a token with --token or TOKEN_FILE",
    "the private key could not be read: permission denied", "no psk is configured for wlan0", "psk: none", "tokens: 812 in, 45 out",
    "token 12 of 512 is a comma", "secret santa is on friday", "basic authentication is not supported", "bearer tokens are rotated daily",
    "the password field is empty", "reset the password by mail", "a cookie is set for 30 days", "key rotation ran at 10:15",
    "--client-secret is required", "argument --client-secret: expected one argument", "api_key is deprecated, use auth_token instead",
    '{"max_tokens": 4096, "tokens_in": 812}', '{"password_set": true, "token_count": 7}', '{"pass": true, "fail": 0}', '{"psk_enabled": false}',
    '{"private_key_id": null}', '{"error": "the password is wrong"}', '[["token_count", "17"], ["name", "bo"]]', '[["accept", "*/*"], ["host", "x"]]',
    '["password", "token", "secret"]', '{"required": ["user", "password", "email"]}', '{"fields": ["id", "api_key", "created_at"]}',
    '{"columns": [["id", "int"], ["password_hash", "text"]]}', '["--help", "--token"]', "choices: ['password', 'token', 'none']",
    "SELECT id, name FROM tokens WHERE used = 0", "DROP USER bo", "ALTER TABLE users ADD COLUMN password_hash text",
    # programs, paths, addresses
    "grep -u file:line src", "docker run -u 1000:1000 image", "['ls', '-u', 'a:b']", '["sort", "-u", "a:b"]', "curl -fsS https://x.example/health",
    "['curl', '-sS', 'https://x.example']", '["redis-cli", "-h", "cache", "ping"]', "redis-cli -h cache info", "ps -a -u root",
    "a:b:c:d:e", "12:5432:1:2:3", "10:15:30:120", "node:5432:ready", "listening on db.example.com:5432", "src/app.py:12:5:E501:line",
    "usr/lib/python3.11/site-packages/app/main.py", "/srv/data/2026/05/01/events-000012.jsonl", "https://x.example/a/b?page=2&sort=asc",
    "https://x.example/q?next=%2Fhome%3Fpage%3D2%26sort%3Dasc", "name=%22bo%22%20age%3D12", "a%20b%20c", "50%25 of 100%25",
    "std::vector<std::string> names", "git@git.example.com:a/b.git", "@types/node@20.11.5", "import { token } from './token'", "key: value",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk", "aGVsbG8gd29ybGQsIHRoaXMgaXMganVzdCB0ZXh0", "hvs.example is a host",
    "ya29 is a build", "AbstractSingletonProxyFactoryBeanConfigurationHandler", "supercalifragilisticexpialidocious_and_more_words_here",
    "user: bo", "auth: disabled", "pin: none", "sl.example.com is down", "EAACH is a code", "PASS test_login", "PASS 12 FAIL 3", "AUTH failed",
    "identified by its name", "r8_test", "lsv2 is the second version",
)  # fmt: skip


class Found(NamedTuple):
    left: list[Secret]
    """The secrets that are left."""
    false: list[tuple[str, str]]
    """A harmless text, and what it became. At the full level, only markers of secrets count."""


def measured(level: Level) -> Found:
    redactor = Redactor(level)
    secrets = SECRETS + ENCODED if level == "full" else SECRETS
    left = [one for one in secrets if any(survives(one.value, after) for after in _both(redactor, one.text))]
    return Found(left, [(text, after) for text in HARMLESS if (after := _changed(redactor, text))])


def _both(redactor: Redactor, text: str) -> tuple[str, str, str]:
    """What is left of a text as a message, as a body, and as a string in a body."""
    return redactor.text(text), redactor.payload(text), redactor.payload(json.dumps({"note": [text]}))


def _changed(redactor: Redactor, text: str) -> str:
    """What a harmless text became; empty when nothing in it was taken for a secret."""
    after = redactor.text(text)
    return after if {match[1] for match in MARKER.finditer(after)} - {"quoted", "digits"} else ""


LEVELS: tuple[Level, ...] = ("full", "medium")


def report(level: Level, found: Found) -> str:
    secrets = len(SECRETS) + len(ENCODED) * (level == "full")
    return (
        f"{level}: {len(found.left)} of {secrets} secrets are left, "
        f"{len(found.false)} of {len(HARMLESS)} harmless texts changed"
    )


if __name__ == "__main__":
    for level in LEVELS:
        found = measured(level)
        print(report(level, found))
        for secret in found.left:
            print(f"  {secret.carrier}: {secret.text!r} -> {Redactor(level).text(secret.text)!r}")
        for before, after in found.false:
            print(f"  harmless: {before!r} -> {after!r}")
