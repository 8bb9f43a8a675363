"""Texts written by hand, with the truth beside them, to measure the rules on what they were not made from.

Whoever mends a rule does not look here first: `tests/redactioncorpus.py` is for that. They are payloads, logs
and errors as agents write them, with secrets and personal data in forms that rules may miss, and near misses.
`python -m tests.redactionholdout` prints precision and recall of each class, and everything that goes wrong.
"""

import json
from collections.abc import Iterator

from postroom.core.redaction import Redactor
from tests.redactioncorpus import NONE, Sample, Score, measure, misses, report

# class: (what must not be left, the text around it; {} is where it stands)
PLANTED: dict[str, tuple[tuple[str, str], ...]] = {
    "email": (
        ("maria.lopez@clinic.example.org", "Patient intake form submitted by {} at the front desk"),
        ("JOHN.DOE@EXAMPLE.COM", "RCPT TO:<{}> rejected: mailbox full"),
        ("o.brien-smith+bills@sub.mail.example.ie", "forwarded invoice to {}; cc none"),
        ("kontakt@münchen.example.de", "Antwort an {} gesendet"),
        ("svc_account@project-1234.iam.example.com", '{{"principal": "{}", "role": "editor"}}'),
        ("a@b.co", "users: [{}]"),
        ("jane_doe99@example.travel", "git log: Author: Jane Doe <{}>"),
        ("bob%40example.net", "GET /unsubscribe?who={}&list=7 200"),
        ("li.wei@公司.example.cn", "联系人 {} 已确认"),
        ("first.last@10minutemail.example", "signup blocked for {} (disposable)"),
        ("noreply@example.com", "From: No Reply <{}>\nSubject: Hi"),
        ("quinn@example.ie", "escalated by o'{} yesterday"),
        ("anna@example.com", 'agent said "ask {}, she knows"'),
        ("x.y@example.com", "ldap: uid=xy,mail={},ou=people"),
        ("press@example.museum", "mailto:{}?subject=Question"),
        ("daniel@mail.example", "https://calendar.test/u/{}/events"),
    ),
    "phone": (
        ("+442079460958", "caller id {} hung up"),
        ("+1-202-555-0143", "text me at {} please"),
        ("(415) 555-2671", "Fax: {}"),
        ("212.555.0199", "emergency contact {} (sister)"),
        ("+49 (0)30 1234567", "Büro {} ab neun Uhr"),
        ("+33 6 12 34 56 78", "Tel. {} le soir"),
        ("+81-3-1234-5678", "tokyo office {} closed"),
        ("0171 2345678", "phone: {}"),
        ("+61 412 345 678", "SMS sent to {}, status delivered"),
        ("555-867-5309", "twilio error 21211: {} is not a valid number"),
        ("+919876543210", "whatsapp:{} opted out"),
        ("1 (800) 555-0199", "call {} for support"),
        ("07700 900123", "mobile: {}"),
        ("030/1234567", "Telefon {} (Zentrale)"),
        ("+5511912345678", '{{"to": "{}", "body": "your code"}}'),
        ("+7 495 123-45-67", "перезвонить {} завтра"),
    ),
    "card": (
        ("4242424242424242", "stripe: card {} was declined (insufficient_funds)"),
        ("5555 5555 5555 4444", "charge of $40 on {} succeeded"),
        ("378282246310005", "amex {} exp 12/27"),
        ("6011-1111-1111-1117", "refund to {} pending"),
        ("4000056655665556", "PAN={} posted"),
        ("3530111333300000", "JCB {}"),
        ("30569309025904", "diners {} unsupported"),
        ("4012888888881881", "customer typed {} into the chat"),
        ("2223003122003222", "[{}]"),
        ("5105105105105100", "number:{}, name: J DOE"),
        ("4111111111111111", '{{"payment": {{"number": {}, "brand": "visa"}}}}'),
        ("4242 4242 4242 4242", '{{"transcript": "my card is {} thanks"}}'),
    ),
    "iban": (
        ("DE89370400440532013000", "SEPA transfer to {} failed: R-transaction"),
        ("GB29 NWBK 6016 1331 9268 19", "Please pay {} by Friday"),
        ("FR1420041010050500013M02606", "compte {} clôturé"),
        ("NL91ABNA0417164300", "iban={}"),
        ("CH93 0076 2011 6238 5295 7", "Konto: {}."),
        ("ES9121000418450200051332", '{{"creditor": "{}"}}'),
        ("IT60X0542811101000000123456", "bonifico su {} ricevuto"),
        ("PL61109010140000071219812874", "przelew na {}"),
    ),
    "ip": (
        ("203.0.113.42", "Failed password for root from {} port 51122 ssh2"),
        ("198.51.100.7", '{} - - [05/Feb/2026:14:00:01 +0000] "GET / HTTP/1.1" 200 612'),
        ("2001:db8:85a3::8a2e:370:7334", "peer {} disconnected"),
        ("192.168.178.20", "ws://{}:8080/socket closed 1006"),
        ("10.0.0.12", "upstream=http://{}/api timed out"),
        ("fe80::1ff:fe23:4567:890a", "neighbor {}%eth0 lladdr unknown"),
        ("172.16.254.1", "X-Forwarded-For: {}, proxy"),
        ("100.64.3.9", "node({}) NotReady"),
        ("8.8.8.8", "nameserver {}"),
        ("2606:4700:4700::1111", "dial udp [{}]:53: i/o timeout"),
        ("::1", "listening on [{}]:8000"),
        ("203.0.113.0", "blocked range {}/24"),
    ),
    "ssn": (
        ("078-05-1120", "applicant SSN {} verified"),
        ("219-09-9999", "ssn={}"),
        ("457-55-5462", "W-2 for {} generated"),
        ("123456789", '{{"ssn": "{}"}}'),
        ("512-34-6789", '{{"note": "his social is {}, keep it safe"}}'),
        ("601 23 4567", "social security number {} on file"),
    ),
    "key": (
        ("AKIAI44QH8DHBEXAMPLE", "using credentials {} from env"),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "remote: https://{}@github.com/acme/x.git"),
        (
            "sk-proj-Zk3vT9qLw82mXbN4cJ7yR1uHs6GdPfAe",
            "openai.AuthenticationError: Incorrect API key provided: {}.",
        ),
        ("sk-ant-api03-hR8s2Kd91mZpQxV5tYwB7nLc-Jf3gAA", "anthropic client built with {}"),
        ("xoxp-2345678901-2345678901-abcdef012345", "slack token {} revoked"),
        ("AIzaSyD4nV7bQ2xLm8Rk1Tz5Wp9Jc3Gh6Fy0EuS", "maps key {} over quota"),
        ("glpat-9vXq3mZsT7kLp2RwYbNc", "git clone https://oauth2:{}@gitlab.example.com/a/b.git"),
        ("glpat-4hQe8rTyUi0pAsDfGhJk", "found {} in .netrc"),
        ("hf_aBcD3fGhIjKlMnOpQrStUvWxYz012345", "huggingface login {}"),
        ("npm_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8", "npm ERR! 401 {}"),
        ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "charge created with {}"),
        ("whsec_8fJ2kLmN4pQrS6tUvWxYz1AbC3dEfG5h", "webhook secret {} rotated"),
        ("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", "sendgrid {} rejected"),
        ("dop_v1_0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9", "doctl uses {}"),
        ("pypi-AgEIcHlwaS5vcmcCJDEyMzQ1Njc4LWFiY2QtZWYwMS0yMzQ1", "twine upload -p {} dist/*"),
        ("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", "shopify {} scope missing"),
        ("ya29.a0AfB_byC3dEfGhIjKlMnOpQrStUvWxYz0123456789", "google oauth {} expired"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N", "session {} invalid"),
        ("MIIEpAIBAAKCAQEA7bq2Zx1", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"),
        ("b3BlbnNzaC1rZXktdjEAAAAA", '{{"file": "-----BEGIN OPENSSH PRIVATE KEY-----\\n{}\\n"}}'),
        ("QWxhZGRpbjpvcGVuIHNlc2FtZQ==", "sent header Basic {}"),
        ("mF_9.B5f-4.1JqM", "WWW-Authenticate failed for Bearer {}"),
        ("7f9c24e5a1b84f0d9e6b3c2a", "the api key is {}"),
        ("AGE-SECRET-KEY-1QYQSZQGPQYQSZQGPQYQSZQGPQYQSZQGPQYQSZQGPQYQSZQGPQYQ", "sops: {}"),
        ("lin_api_9aB8cD7eF6gH5iJ4kL3mN2oP1qR0sT", "linear {} used by the bot"),
        ("xapp-1-A012BCDEF34-1234567890123-0a1b2c3d4e5f6a7b8c9d", "socket mode {}"),
    ),
    "redacted": (
        ("hunter2isold", "login failed: user=admin password={}"),
        ("S3cr3t!Pass", "mysql -u root -p'x' --password={} shop"),
        ("tr0ub4dor&3", '{{"username": "bo", "password": "{}"}}'),
        ("correct horse battery", '{{"passphrase": "{}"}}'),
        ("0d3f9a7c55", "DATABASE_URL=postgresql://svc:{}@pg.internal:5432/app"),
        ("pa55w0rd", "redis://:{}@cache:6379/0"),
        ("Zx81!qq", "PGPASSWORD={} psql -h db"),
        ("9f8e7d6c5b4a", "X-API-Key: {}"),
        ("abc123def456", "curl -H 'Authorization: token {}' https://api.example.com"),
        ("k3yk3yk3y", 'os.environ["OPENAI_API_KEY"] = "{}"'),
        ("77-s3krit-app", "client_id=app&client_secret={}&grant_type=client_credentials"),
        ("r3fr3shm3now", '{{"refresh_token": "{}", "expires_in": 3600}}'),
        ("JSESS9A8B7C6D", "Cookie: JSESSIONID={}; Path=/"),
        ("sid-55aa55aa", "Set-Cookie: sid={}; HttpOnly"),
        ("1990-04-01", '{{"name": "Bo", "dateOfBirth": "{}"}}'),
        ("846201", '{{"otp": "{}"}}'),
        ("737", '{{"card": {{"cvv": "{}"}}}}'),
        ("hooks/T0AB1/B2CD3/xYz789AbC", "webhook_secret={}"),
        ("D4v1d!2020", "kubectl create secret generic db --from-literal=password={}"),
        ("s3same0pen", "spring.datasource.password: {}"),
        ("p@ssw0rd9", "{{'user': 'bo', 'passwd': '{}'}}"),
        ("4dm1nt0ken", "ADMIN_TOKEN: {}"),
        ("qwerty99", "Password is: {}"),
        ("t0psecret8", "<Password>{}</Password>"),
        ("Zm9vYmFyOTk5==", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};"),
        ("dXNlcjpwYXNz", '{{"headers": {{"authorization": "Basic {}"}}}}'),
        ("v3rys3cret", '{{"env": [{{"name": "DB_PASSWORD", "value": "{}"}}]}}'),
        ("6Lf9aBcDeFgH", "recaptcha secret-key={}"),
        ("81f3c0de", "https://example.com/reset?token={}"),
        ("AbC%2FdEf123%3D", "https://s3.example.com/o?X-Amz-Signature={}&X-Amz-Date=1"),
        ("mypw 12", 'password = "{}"  # todo'),
        ("L3tM31n", "ftp://deploy:{}@files.example.com/in"),
        ("n0tt0day", "--token {} --verbose"),
        ("x9x9x9x9", "login with user bo and password {}"),
    ),
}
HOLDOUT_NEAR_MISSES = (
    "HTTP/1.1 200 OK in 12.5 ms",
    "max_tokens=1024 temperature=0.7 top_p=1.0",
    "prompt_tokens: 512, completion_tokens: 128",
    "Python 3.11.7 on linux, numpy 1.26.4, torch==2.1.0+cu121",
    "Mozilla/5.0 (X11; Linux x86_64) Chrome/120.0.6099.109 Safari/537.36",
    "traceback at 2026-02-05 14:03:22,118 in worker-3",
    "request_id=3f2504e0-4f89-11d3-9a0c-0305e82c3301 took 31ms",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "commit 1d3b0a7 merges #4242 and #1337",
    "the tokenizer splits token: by token",
    "KeyError: 'password'",
    "TypeError: password must be str, not None",
    "unexpected token < in JSON at position 0",
    "Field 'api_key' is required",
    "the secret of good tests is patience",
    "author = Bob, authority = none",
    "SELECT id, password_hash FROM users LIMIT 10",
    "def reset_password(user, token=None):",
    "class TokenBucket: rate: int = 5",
    "lat 52.520008, lon 13.404954",
    "order 1234567890123456 shipped",
    "EAN 4006381333931 in stock",
    "tracking 1Z999AA10123456784 delivered",
    "ISBN 978-0-13-468599-1",
    "matrix 10x10, ratio 4:3, score 21-14",
    "chmod 755 run.sh; exit 127",
    "CVE-2024-3094 affects xz 5.6.0",
    "RFC 2822 section 3.4.1",
    "10.15.7 is the macOS version",
    "upgraded 1.2.3 to 1.2.4.1 yesterday",
    "version 4.18.0.553 of the kernel",
    "std::unique_ptr<Foo> and Foo::bar()",
    "a::b::c is a path",
    "12:30:45 to 13:00:00 daily",
    "MAC 00:1a:2b:3c:4d:5e joined",
    "arn:aws:s3:::my-bucket/key",
    "docker pull hub.example/acme/api@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcde",
    "npm install @types/node@20.11.5",
    "follow @anna on the forum",
    "@pytest.fixture def client():",
    "ssh git@gitlab.example.com",
    "x = y @ z.T  # matmul",
    "2026-02-05T14:03:22.118Z",
    "epoch 1770000000, millis 1770000000123",
    "phone support is open, extension list follows",
    "the pin on the map marks the spot",
    "pin numpy to 1.26",
    "cookie recipes: 200 g butter",
    "basic auth is disabled",
    "bearer token missing",
    "task-runner-with-a-long-name-2024 finished",
    "disk-usage-report-2026-02 written",
    "gh pr list --limit 20",
    "sk-learn and scikit-learn are the same",
    "session_id column renamed to session_key",
    "primary key (id), foreign key (org_id) references org",
    "keyword arguments: key=value",
    "sort=key&dir=asc&page=2",
    "https://example.com/docs/authorization#tokens",
    "https://example.com/a/b?code=42&state=open",
    "IBAN must have 22 characters for DE",
    "GB12 is a seat, AB12 CDE is a plate",
    "$1,234.56 + 19% = $1,469.13",
    "rows 300-400-5000",
    "800-53 and 800-171 are standards",
    '{"id": 4111111111111112, "n": 16}',
    '{"tokens": 812, "token_count": 3, "secretary": "Bo", "pinned": true}',
    '{"password_policy": "12 characters", "author": "Ng"}',
    '{"version": "10.0.19045.1", "os": "windows"}',
    '{"status": "authorized", "key": "ctrl+c"}',
)  # fmt: skip


def holdout() -> list[Sample]:
    return [*_planted(), *(Sample(NONE, text, text, "near miss") for text in HOLDOUT_NEAR_MISSES)]


def _planted() -> Iterator[Sample]:
    for kind, pairs in PLANTED.items():
        for value, frame in pairs:
            yield Sample(kind, value, frame.format(value), kind)


class Either(Redactor):
    """What is JSON is redacted as a payload, all else as a text."""

    def text(self, text: str) -> str:
        try:
            json.loads(text)
        except ValueError:
            return super().text(text)
        return self.payload(text)


def overall(scores: dict[str, Score]) -> Score:
    return Score(*map(sum, zip(*scores.values(), strict=True)))


if __name__ == "__main__":
    medium = Either("medium")
    found = measure(holdout(), medium)
    print(report({**found, "all": overall(found)}))
    for sample, text in misses(holdout(), medium):
        print(f"{sample.source}: {sample.text!r} -> {text!r}")
