"""Secrets of many kinds as operators meet them, and harmless texts that look like them.

Written as an outsider would: configuration, environment, command lines, webhooks, errors. The keys are made
up. `python -m tests.redactionoutside` prints how many are found at the medium level, and what goes wrong.
"""
# ruff: noqa: E501 - one sample a line

import json
from typing import NamedTuple

from tests.redactioncorpus import MARKER, survives
from tests.redactionholdout import Either

_HEX = "3f9a1c7be04d52861ac9f0b37de8246519cf7a30"
_OPAQUE = "Zk4xQ9wLr2Tn8VbYc5Md7HsGj3Pf6RaE1uKi0oWq"

# (what must not be left, the text that holds it)
SECRETS: tuple[tuple[str, str], ...] = (
    # names of fields
    ("hunter2x", '{"user": "bo", "userPass": "hunter2x"}'),
    ("korrekt-pferd", '{"db_pw": "korrekt-pferd"}'),
    ("s3cr3tpw", '{"smtp_pass": "s3cr3tpw", "smtp_port": 587}'),
    ("Winter2024", '{"adminPass": "Winter2024"}'),
    ("wpa-sesame", '{"wifi": {"ssid": "office", "wifi_pass": "wpa-sesame"}}'),
    ("0p3nsesame", '{"keystorePass": "0p3nsesame"}'),
    ("tr0ub4dor", '{"pw": "tr0ub4dor"}'),
    ("mykey-secret-1", '{"clientSecret": "mykey-secret-1"}'),
    ("kf83hf0ahf", '{"webhook_secret": "kf83hf0ahf"}'),
    ("hash-salt-9", '{"jwt_secret_key": "hash-salt-9"}'),
    # a name beside its value
    ("swordfish77", '{"name": "password", "value": "swordfish77"}'),
    ("swordfish78", '{"env": [{"name": "DB_PASSWORD", "value": "swordfish78"}, {"name": "TZ", "value": "UTC"}]}'),
    ("swordfish79", '{"Key": "api_key", "Value": "swordfish79"}'),
    ("swordfish80", '{"value": "swordfish80", "name": "smtp_pass"}'),
    ("swordfish81", '{"headers": [{"name": "Authorization", "value": "swordfish81"}]}'),
    ("swordfish82", '{"ParameterKey": "MasterUserPassword", "ParameterValue": "swordfish82"}'),
    ("swordfish83", "env:\n  - name: DB_PASSWORD\n    value: swordfish83\n"),
    ("swordfish84", 'failed to apply: {"name":"DB_PASSWORD","value":"swordfish84"} is immutable'),
    ("swordfish85", '{"log": "got {\\"name\\": \\"token\\", \\"value\\": \\"swordfish85\\"}"}'),
    # command lines
    ("opensesame1", "mysqldump --password opensesame1 --all-databases"),
    ("opensesame2", "deploy --db-pass opensesame2 --force"),
    ("opensesame3", '{"cmd": ["mysql", "--password", "opensesame3", "app"]}'),
    ("opensesame4", '{"args": ["--api-key", "opensesame4"]}'),
    ("opensesame5", "curl -u admin:opensesame5 https://ci.example.com/api"),
    ("opensesame6", "curl --user 'admin:opensesame6' https://ci.example.com/api"),
    ("opensesame7", '{"argv": ["curl", "-u", "admin:opensesame7", "https://ci.example.com"]}'),
    ("opensesame8", "sshpass -p opensesame8 ssh root@host"),
    ("opensesame9", "docker login --username bo --password=opensesame9 registry"),
    ("opensesame10", "openssl rsa -in k.pem -passin pass:opensesame10"),
    # environment files
    ("pgsesame1", "PGPASSWORD=pgsesame1 psql -h db"),
    ("pgsesame2", "export MYSQL_PWD=pgsesame2"),
    ("pgsesame3x", "REDIS_PASS=pgsesame3x\nREDIS_HOST=cache"),
    ("f83hdk20dkfh38dkf0", "MAILGUN_KEY=f83hdk20dkfh38dkf0"),
    ("pgsesame4", '{"env": ["PATH=/bin", "DB_PASS=pgsesame4"]}'),
    ("9dk3ls03kdl3", "SENTRY_AUTH_TOKEN='9dk3ls03kdl3'"),
    ("kd93kd03kd93k2", "DJANGO_SECRET_KEY=kd93kd03kd93k2"),
    # keys of vendors
    (f"SG.{_OPAQUE[:22]}.{_OPAQUE}abc", f"sendgrid refused SG.{_OPAQUE[:22]}.{_OPAQUE}abc"),
    (f"B0EXAMPLE/{_OPAQUE[:24]}", f"POST https://hooks.slack.com/services/T0EXAMPLE/B0EXAMPLE/{_OPAQUE[:24]} 404"),
    (_OPAQUE + "aBcD", f"https://discord.com/api/webhooks/123456789012345678/{_OPAQUE}aBcD"),
    (_HEX[:32], f"https://acme.webhook.office.com/webhookb2/1a-2b@3c/IncomingWebhook/{_HEX[:32]}/9f"),
    (f"ya29.{_OPAQUE}", f"oauth token ya29.{_OPAQUE} expired"),
    (f"GOCSPX-{_OPAQUE[:28]}", f"client GOCSPX-{_OPAQUE[:28]} is unknown"),
    (f"hvs.{_OPAQUE[:24]}", f"vault: permission denied for hvs.{_OPAQUE[:24]}"),
    (f"key-{_HEX[:32]}", f"mailgun said 401 for key-{_HEX[:32]}"),
    (f"{_HEX[:32]}-us14", f"mailchimp {_HEX[:32]}-us14"),
    (f"AA{_OPAQUE[:33]}", f"https://api.telegram.org/bot812345678:AA{_OPAQUE[:33]}/sendMessage"),
    (f"dapi{_HEX[:32]}", f"databricks dapi{_HEX[:32]} revoked"),
    (f"gsk_{_OPAQUE}", f"groq gsk_{_OPAQUE} over quota"),
    (f"glsa_{_OPAQUE[:32]}_{_HEX[:8]}", f"grafana glsa_{_OPAQUE[:32]}_{_HEX[:8]}"),
    (f"NRAK-{_OPAQUE[:27].upper()}", f"newrelic NRAK-{_OPAQUE[:27].upper()}"),
    (f"sq0atp-{_OPAQUE[:22]}", f"square sq0atp-{_OPAQUE[:22]}"),
    (f"ATATT3xFfGF0{_OPAQUE}", f"jira ATATT3xFfGF0{_OPAQUE}=1A2B3C4D"),
    (f"SK{_HEX[:32]}", f"twilio SK{_HEX[:32]} is not a main key"),
    ("AKIAIOSFODNN7EXAMPLE", "found AKIAIOSFODNN7EXAMPLE in the bucket policy"),
    (f"ghp_{_OPAQUE[:36]}", f"remote: https://ghp_{_OPAQUE[:36]}@github.com/a/b.git"),
    (f"glpat-{_OPAQUE[:20]}", f"git clone failed: glpat-{_OPAQUE[:20]}"),
    (f"xoxb-1234567890-{_OPAQUE[:24]}", f"slack: xoxb-1234567890-{_OPAQUE[:24]}"),
    # addresses with a password, and connection strings
    ("p4ssw0rd", "postgres://app:p4ssw0rd@db.example.com:5432/app"),
    ("p4ssw0rd", "amqps://svc:p4ssw0rd@mq.example.com/vhost"),
    ("p4ssw0rd", "Server=tcp:db;Database=a;Uid=sa;Pwd=p4ssw0rd;Encrypt=yes"),
    ("dGhpc2lzYWtleQ9x8w7v==", "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=dGhpc2lzYWtleQ9x8w7v==;"),
    ("kD93kdLs92kdLs0==", "Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey=kD93kdLs92kdLs0=="),
    ("p4ssw0rd", "jdbc:oracle:thin:scott/p4ssw0rd@//db:1521/x"),
    ("p4ssw0rd", "jdbc:mysql://db/app?user=bo&password=p4ssw0rd"),
    (_HEX[:32], f"SENTRY_DSN=https://{_HEX[:32]}@o123.ingest.example.io/45"),
    # the rest
    ("MIIEowIBAAKCAQEA", "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"),
    ("YWRtaW46aHVudGVyMg==", "Authorization: Basic YWRtaW46aHVudGVyMg=="),
    ("hunter2y", "machine ftp.example.com login bo password hunter2y"),
    ("hunter3zz", "//registry.example.com/:_authToken=hunter3zz"),
)  # fmt: skip

HARMLESS: tuple[str, ...] = (
    '{"pass": true, "fail": false}', '{"tests": {"pass": 12, "fail": 3}}', "PASS: test_login (0.12s)",
    "12 passed, 3 failed in 4.5s", '{"boarding": "gate 12", "passenger": "2B"}', '{"compass": "north-east"}',
    '{"bypass": "cache-layer-2"}', "first pass: 20 files, second pass: 4 files", '{"pwm": "50%", "power": "12 W"}',
    '{"name": "colour", "value": "dark-green-77"}', '{"name": "TZ", "value": "Europe/Berlin"}',
    '{"name": "max_tokens", "value": "4096"}', '{"name": "password_policy", "value": "at least 12"}',
    '{"Key": "Environment", "Value": "production"}', '{"name": "tokenizer", "value": "cl100k"}',
    '{"key": "primary", "value": "shard-00012"}', '{"name": "keyboard", "value": "us-intl"}',
    "env:\n  - name: LOG_LEVEL\n    value: debug\n", '{"headers": [{"name": "Accept", "value": "text/html"}]}',
    "grep -u file:line src", "docker run -u 1000:1000 image", "sort -u input.txt", "chown --user 1000:1000 data",
    "tar --exclude node_modules -czf out.tgz .", "ls --color auto --sort time", '{"args": ["--verbose", "--port", "8080"]}',
    '{"argv": ["rsync", "-p", "--progress", "src", "dst"]}', "mkdir -p build/output2", "cp -p file1 file2",
    "PATH=/usr/bin HOME=/root LANG=C.UTF-8", "PRIMARY_KEY=id FOREIGN_KEY=org_id", "CACHE_KEY=users:list",
    "SORT_KEY=created_at", "KEY_PREFIX=prod", "TOKEN_LIMIT=4096", "export EDITOR=vim", "PASSES=3 RETRIES=5",
    "PASS_THRESHOLD=0.8", "SG.1 is a seat group", "see section SG.2.4 of the guide", "hooks.slack.com is down",
    "https://hooks.slack.com/ returned 503", "https://discord.com/channels/123456789012345678/234567890123456789",
    "docs at https://example.com/api/webhooks/overview", "version ya29 of the parser", "hvs is high voltage supply",
    "key-value store", "key-frame 12 of 40", "press any key-combination", "the dapi module", "task-sq0-done",
    "us14 is a region, 0f9a is not", "sha256:3f9a1c7be04d52861ac9f0b37de82465aa19cf7a30bb52861ac9f0b37de82465",
    "commit 3f9a1c7be04d52861ac9f0b37de8246519cf7a30", "etag 3f9a1c7be04d52861ac9f0b37de82465",
    "bot 812345678 joined", "chat 812345678:42 closed", "SKU SK12345 in stock", "ratio 16:9, time 12:30:45",
    "https://example.com/a@b/c", "jdbc:postgresql://db:5432/app", "scott/tiger is a book", "ssh://git@host/repo.git",
    "sentry: https://sentry.example.io/organizations/45/issues", "password: must not be empty", "password is required",
    '{"error": "token expired"}', "authToken is missing", "login bo at 12:30", "machine learning with 2 gpus",
    '{"secretary": "Bo", "keynote": "10 am"}', '{"passport_office": "open"}', "pass:fail ratio is 3",
)  # fmt: skip


class Found(NamedTuple):
    recall: float
    precision: float
    missed: list[tuple[str, str]]
    """What was left, and the text after redaction."""
    false: list[tuple[str, str]]
    """A harmless text, and what it became."""


def measured() -> Found:
    redactor = Either("medium")
    missed = [(secret, text) for secret, before in SECRETS if survives(secret, text := redactor.text(before))]
    false = [(text, after) for text in HARMLESS if MARKER.search(after := redactor.text(text))]
    found = len(SECRETS) - len(missed)
    return Found(found / len(SECRETS), found / (found + len(false)), missed, false)


if __name__ == "__main__":
    result = measured()
    print(
        json.dumps(
            {
                "secrets": len(SECRETS),
                "harmless": len(HARMLESS),
                "recall": round(result.recall, 3),
                "precision": round(result.precision, 3),
            }
        )
    )
    for one, other in (*result.missed, *result.false):
        print(f"{one!r} -> {other!r}")
