"""The redaction rules: each has a pattern, the trigger group that activates it, and an optional check.

Patterns use only the syntax that Python's `re` (ASCII) and Java's regex share.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from postroom.core.redaction.checks import address, card, iban, trimmed_list

# The groups of rules, as bits: a trigger activates a whole group.
CUSTOM, FIELDS, LINKS, EMAILS, PHONES, CARDS, IBANS, SSNS, ADDRESSES = (1 << n for n in range(9))
WORDED, PREFIXED, BEARERS, JWTS, CLOUDS, BLOCKS, VENDORS = (1 << n for n in range(9, 16))  # keys
# A field name next to its value: in a text, and in parsed JSON, where the walk over the values finds it.
NAMED, PAIRS = (1 << n for n in range(16, 18))
PROGRAMS, ENCODED = (1 << n for n in range(18, 20))  # commands and files of known programs, and `%3D` for `=`
EVERYTHING: Final = (1 << 20) - 1


class Rule(NamedTuple):
    """One kind of secret. The pattern's group that matched is replaced, or the whole match without groups."""

    name: str
    """The marker's name."""
    group: int
    pattern: str
    hints: tuple[str, ...]
    """A text that contains none of these has no match."""
    check: Callable[[str], int] | None = None
    fold: Callable[[str], str] | None = None
    """Normalizes different spellings of one value before a token is made."""


def _glued(found: str) -> str:
    return "".join(filter(str.isalnum, found)).upper()


_OCTETS: Final = r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
_HEX: Final = r"[0-9A-Fa-f]"


def _escapes(behind: str = "") -> str:
    return (
        rf"|(?<=\\[0abefnrtv]{behind})|(?<=%{_HEX}{{2}}{behind})|(?<=\\u{_HEX}{{4}}{behind})"
        rf"|(?<=\\x{_HEX}{{2}}{behind})|(?<=[\[;][0-9]m{behind})|(?<=[\[;][0-9]{{2}}m{behind})"
    )


def _begins(behind: str = "", word: str = "A-Za-z0-9") -> str:
    """A pattern for the start of a word; `behind` is the part of the word that is already matched.

    An escape sequence, such as a newline written as two characters, ends in a letter or digit but is not part
    of the word. The same holds for the colour codes of a terminal.
    """
    return f"(?:(?<![{word}]{behind}){_escapes(behind)})"


_ESCAPE_ENDS: Final = rf"(?:(?<=\\)(?:[0abefnrtv]|u{_HEX}{{4}}|x{_HEX}{{2}})|(?<=%){_HEX}{{2}})?"


_BEGINS: Final = _begins()
_BLANK: Final = r" \u00a0\u2007\u2009\u202f"
_DASH: Final = r"\u2010-\u2015-"
_GAP: Final = rf"(?:[{_BLANK}.{_DASH}]|[{_BLANK}]{{2}})"  # between groups of digits
_SEPARATOR: Final = rf"[{_BLANK}.{_DASH}]"  # between groups of one or two digits
_LOCAL: Final = r"[A-Za-z0-9.!#$&*+_~^\u00c0-\u04ff-]"
_LABEL: Final = r"[A-Za-z0-9\u00c0-\u04ff\u3040-\u9fff\uac00-\ud7a3]"
OPAQUE: Final = r"[A-Za-z0-9_-]"
SHOWN: Final = r"[A-Za-z0-9+/_.=~-]"
BARE: Final = r"[^\x00-\x20\"'<>&]"
# Further characters of a value: `&` unless another parameter follows, and `<`, `>`, `'` within a word.
_WITHIN: Final = rf"(?:&(?![A-Za-z0-9_.%\[\]-]{{1,64}}=)|<(?!/)|>(?={BARE})|'(?=[A-Za-z0-9]))"
_LINE_END: Final = r"(?:\r?\n|(?:\\{1,7}r)?\\{1,7}n)"
UNQUOTED: Final = (
    r"((?:(?i:bearer|basic|token|digest) {1,4})?(?!=|(?:None|null|[Tt]rue|[Ff]alse)[^A-Za-z0-9])"
    rf"(?![|>][0-9+-]{{0,2}}{_LINE_END})"
    rf"{BARE}{{1,8192}}(?:{_WITHIN}{BARE}{{0,8192}})*"
    r"(?: [0-9]{2,8}(?![A-Za-z0-9.:]))*)"
)
QUOTED: Final = (
    r"[BFRUbfru]{0,2}(?:\"((?:[^\"\\]|\\.)+)|'((?:[^'\\]|\\.)+)|"
    r"\\{1,7}[\"']([^\"'\\]+(?:\\{1,7}[^\"'\\]+)*))"  # \"escaped\"
)
# A list or an object within a text is replaced as a whole, even when its end is missing.
NESTED: Final = (
    r"((?=[\[{(][\[{( \t\r\n]{0,16}[BUbu]?[\"'\\0-9])"
    r"(?:\[(?:[^\[\]]|\[[^\[\]]*\]){0,8192}\]?|\{(?:[^{}]|\{[^{}]*\}){0,8192}\}?"
    r"|\((?:[^()]|\([^()]*\)){0,8192}\)?))"
)
SPACE: Final = r"(?:[ \t]|\\{1,7}t){0,4}+"
NEXT_LINE: Final = rf"(?:{_LINE_END}[ \t]{{1,16}})?+"
# A YAML block: all of its lines.
BLOCK: Final = rf"[|>][0-9+-]{{0,2}}{_LINE_END}[ \t]{{1,16}}([^ \t\n][^\n]*(?:\n[ \t]+[^\n]+)*)"
_DIGEST: Final = (  # the one scheme of `Authorization` that has quotation marks
    r"((?i:digest) (?:[A-Za-z]{1,32}=(?:\\{0,7}\"[^\"\\\x00-\x1f]{0,512}\\{0,7}\"|[^\x00-\x20,\"]{1,512})"
    r"[, ]{0,4}){1,32})"
)
LIST_STARTS: Final = ('="', *(opens + item for opens in "[(" for item in ('"', "'", "\\", 'b"', "b'")))
EQUALS: Final = r":?={1,3}>?"

_SAFE: Final = r"(?:[^\x00-\x20\"'<>&\\]|\\\\)"  # whose replacement leaves JSON what it is
# From an option to its value, in a command or in a list of arguments.
_ARGUMENT: Final = r"(?: {1,4}[\"'\\]{0,8}|[\"'\\]{1,8},[ \t\r\n]{0,8}[BUbu]?[\"'\\]{1,8})"

# Servers whose addresses have a password, also when the address is mistyped.
_SERVERS: Final = r"(?i:postgre[a-z]{0,5}|mysql|mariadb|mongodb(?:\+srv)?|rediss?|amqps?|nats|falkordb)"

RULES: Final = (
    Rule(
        "key",
        BLOCKS,
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----[^-\"]*(?:-(?!----)[^-\"]*)*"
        r"(?:-----END [A-Z0-9 ]{0,60}-----)?",
        ("-----BEGIN ",),
    ),
    Rule(
        "key",
        BLOCKS,
        rf"Private-Lines: [0-9]{{1,4}}{_LINE_END}"
        rf"((?:(?!Private-)[A-Za-z0-9+/=]{{1,80}}{_LINE_END}){{1,400}})",
        ("Private-Lines: ",),
    ),
    Rule(
        "redacted",
        LINKS,
        rf"(?://(?!\[)|{_SERVERS}[:/]/?)[^\x00-\x20/?#@:\"'<>]{{0,128}}"
        r":(?:([^\x00-\x20/?#\"'<>]{1,256})|(?![0-9]{1,5}[,/?#\]])([^\x00-\x20\"'<>]{1,256}))@",
        (":",),
    ),
    Rule(
        "redacted",
        VENDORS,
        r"jdbc:oracle:[a-z]{1,8}:[^\x00-\x20/@]{1,128}/([^\x00-\x20@]{1,128})@",
        ("jdbc:",),
    ),
    Rule(
        "redacted",
        FIELDS,
        rf"(?i:authorization|cookie)[\"'\\]{{0,4}}[ \t]{{0,4}}:[ \t]{{0,4}}(?!Bearer TOKEN')"
        rf"(?:{NESTED}|{_DIGEST}|(?:[BUbu](?=[\"']))?[\"'\\]{{0,4}}([^\x00-\x20\"'<>\\][^\x00-\x1f\"'<>\\]*))",
        (":",),
        trimmed_list,
    ),
    Rule(
        "redacted",
        LINKS,
        rf"[?&;](?i:x-amz-|x-goog-)?(?i:sig|signature|credential|security-token)=({BARE}+)"
        rf"|[?&;](?i:key|code)=({BARE}{{16,}})",
        ("=",),
    ),
    Rule(
        "key",
        JWTS,
        rf"eyJ{_begins('eyJ', 'A-Za-z0-9_-')}{OPAQUE}{{5,}}\.{OPAQUE}{{5,}}(?:\.{OPAQUE}*)*",
        ("eyJ",),
    ),
    Rule("key", CLOUDS, rf"A{_begins('A')}(?:KIA|SIA|ROA|IDA|BIA|CCA)[A-Z0-9]{{16}}(?![A-Za-z0-9])", ("A",)),
    Rule("key", CLOUDS, rf"EAA{_begins('EAA')}[A-Za-z0-9]{{60,}}", ("EAA",)),
    Rule("key", CLOUDS, rf"AIza{_begins('AIza')}{OPAQUE}{{30,}}", ("AIza",)),
    Rule(
        "key",
        PREFIXED,
        rf"{_BEGINS}(?:gh[pousr]|github_pat|hf|npm|[sr]k_(?:live|test)|whsec|shp(?:at|ca|pa|ss)|dop_v1|lin_api|pr"
        r"|r8|sntry[su]|bkua|lsv2_(?:pt|sk)|gsk|glsa|glc|sbp|pscale_(?:tkn|pw)|figd|ntn|dckr_pat|CCIPAT|rubygems)_"
        rf"(?={OPAQUE}{{0,64}}[0-9]){OPAQUE}{{20,}}",
        ("_",),
    ),
    Rule(
        "key",
        WORDED,
        rf"{_BEGINS}(?:sk|glpat|pypi|xapp|AGE-SECRET-KEY|pplx|xkeysib|HRKU)-(?={OPAQUE}{{0,64}}[0-9]){OPAQUE}{{16,}}",
        ("sk-", "glpat-", "pypi-", "xapp-", "KEY-", "pplx-", "sib-", "HRKU-"),
    ),
    Rule("key", WORDED, r"xox[abeoprs]-[A-Za-z0-9-]{10,}", ("xox",)),
    Rule(
        "key",
        BEARERS,
        rf"(?:[Bb]earer|BEARER) {{1,4}}(?={SHOWN}{{0,64}}[0-9])({SHOWN}{{8,}})"
        rf"|(?:Basic|BASIC) {{1,4}}(?=[A-Za-z0-9+/]{{1,64}}[A-Z0-9=])([A-Za-z0-9+/]{{8,}}={{0,2}})",
        ("earer ", "EARER ", "asic ", "ASIC "),
    ),
    Rule(
        "key",
        WORDED,
        rf"(?:[Kk]ey|KEY|[Tt]oken|TOKEN) (?:is |IS )?['`]?(?={SHOWN}{{0,128}}[0-9])"
        rf"(?={SHOWN}{{0,128}}[A-Za-z])({SHOWN}{{16,}})"
        rf"|[Pp]assword (?:is:? )?['`]?(?={BARE}{{0,128}}[0-9])({BARE}{{4,}})"
        rf"|--(?:[a-z]{{1,20}}-){{0,3}}(?:password{_ARGUMENT}(?!-)|(?:token|secret|(?:api|access)-key){_ARGUMENT}(?!-)"
        rf"(?={BARE}{{0,64}}[0-9]|{BARE}{{16}}))({BARE}{{4,}})"
        rf"|machine[ \t\r\n]{{1,8}}{BARE}{{1,256}}[ \t\r\n]{{1,8}}login[ \t\r\n]{{1,8}}{BARE}{{1,128}}"
        rf"[ \t\r\n]{{1,8}}password ({BARE}{{1,}})"
        r"|(?:PASSWORD|(?i:(?:with|set) password|identified by(?: password)?)) {1,4}'([^'\n]{1,256})'"
        rf"|(?:[<>-] |[CS]: )PASS (?={BARE}{{0,64}}[0-9])({BARE}{{6,}})"
        r"|(?<![A-Za-z0-9_.-])AUTH (?:[A-Za-z0-9_-]{1,64} )?"
        rf"(?={SHOWN}{{0,64}}[0-9])(?={SHOWN}{{0,64}}[A-Za-z])({SHOWN}{{8,}})",
        (
            "key ",
            "Key ",
            "KEY ",
            "oken ",
            "OKEN ",
            "word ",
            "WORD ",
            "tified ",
            "TIFIED ",
            "PASS ",
            "AUTH ",
            "--",
        ),
    ),
    Rule(
        "key",
        VENDORS,
        rf"{_BEGINS}SG\.{OPAQUE}{{16,}}\.{OPAQUE}{{16,}}"
        rf"|hooks\.slack\.com/[a-z]{{1,16}}/({SHOWN}{{16,}})"
        rf"|discord(?:app)?\.com/api/(?:v[0-9]{{1,2}}/)?webhooks/[0-9]{{1,24}}/({OPAQUE}{{20,}})"
        rf"|\.webhook\.office\.com/[a-z0-9]{{1,16}}/({BARE}{{20,}})"
        rf"|{_BEGINS}key-{_HEX}{{32}}(?!{_HEX})|{_BEGINS}dapi{_HEX}{{32}}"
        rf"|[0-9]{{8,10}}:(AA{OPAQUE}{{30,}})|{_BEGINS}(?:GOCSPX|NRAK|PMAK|sq0atp|sq0csp)-{OPAQUE}{{16,}}"
        rf"|{_BEGINS}ATATT3xFf{SHOWN}{{20,}}",
        ("SG.", "hook", "key-", "dapi", ":AA", "PX-", "AK-", "sq0", "ATATT"),
    ),
    Rule(
        "key",
        VENDORS,
        r"_KEY=(?<=[A-Z0-9]_KEY=)(?<!CACHE_KEY=)(?<!SORT_KEY=)(?<!PRIMARY_KEY=)(?<!FOREIGN_KEY=)"
        r"(?<!PARTITION_KEY=)(?<!ROUTING_KEY=)(?<!API_KEY=)[\"'\\]{0,4}"
        rf"(?={SHOWN}{{0,64}}[0-9])(?={SHOWN}{{0,64}}[A-Za-z])({SHOWN}{{12,}})",
        ("_KEY=",),
    ),
    Rule(
        "key",
        VENDORS,
        rf"--(?:[a-z]{{1,20}}-){{0,3}}(?:pass|passwd|passphrase|pwd|pw){_ARGUMENT}(?!-)({BARE}{{4,}})"
        rf"|-pass(?:in|out)?{_ARGUMENT}pass:({BARE}{{1,}})",
        ("--", "pass:"),
    ),
    Rule(
        "key",
        PROGRAMS,
        rf"curl(?=[ \"'\\])[^\n]{{0,256}}?[ \"'](?:-[fikLsSv]{{0,4}}u|--user){_ARGUMENT}"
        rf"[A-Za-z0-9._@%+-]{{1,64}}:(?!//)({_SAFE}+)"
        rf"|sshpass{_ARGUMENT}-p(?:{_ARGUMENT})?({_SAFE}+)"
        rf"|redis-cli(?=[ \"'\\])[^\n]{{0,256}}?[ \"']-a{_ARGUMENT}(?!-)({_SAFE}+)"
        rf"|mysql[a-z]{{0,8}}(?=[ \"'\\])[^\n]{{0,256}}?[ \"']-p['\"\\]{{0,4}}({_SAFE}{{3,}})"
        rf"|(?:docker|podman|nerdctl|registry|oras|buildah|skopeo){_ARGUMENT}login(?=[ \"'\\])"
        rf"[^\n]{{0,256}}?[ \"']-p{_ARGUMENT}(?!-)({_SAFE}{{4,}})",
        ("curl", "sshpass", "redis-cli", "mysql", "login"),
    ),
    Rule(
        "key",
        VENDORS,
        r"(?:\$(?:apr1|[156y]|2[abxy]|argon2(?:id|i|d)|scrypt)|pbkdf2_sha[0-9]{1,3}\$[0-9]{1,9})\$"
        r"[A-Za-z0-9./+=,_-]{1,64}\$[A-Za-z0-9./+=,$_-]{16,}",
        ("$",),
    ),
    Rule(
        "key",
        VENDORS,
        rf"{_BEGINS}dp\.(?:pt|st|ct|sa)\.(?={OPAQUE}{{0,64}}[0-9]){OPAQUE}{{20,}}"
        rf"|{_BEGINS}SK[0-9a-f]{{32}}(?![A-Za-z0-9])",
        ("dp.", "SK"),
    ),
    Rule(
        "key",
        VENDORS,
        rf"{_BEGINS}(?:ya29\.(?:[a-z]\.)?|hv[brs]\.)(?={OPAQUE}{{0,64}}[0-9]){OPAQUE}{{20,}}"
        rf"|{_BEGINS}sl\.{OPAQUE}{{60,}}|{_BEGINS}[A-Za-z0-9]{{14}}\.atlasv1\.{OPAQUE}{{40,}}"
        rf"|{_BEGINS}[A-Za-z0-9_.~-]{{3}}[78]Q~[A-Za-z0-9_.~-]{{30,}}"
        rf"|{_BEGINS}[0-9a-f]{{32}}-us[0-9]{{1,2}}(?![A-Za-z0-9])",
        ("ya29.", "hvb.", "hvr.", "hvs.", "sl.", ".atlasv1.", "Q~", "-us"),
    ),
    Rule(
        "key",
        PROGRAMS,
        r":(?<=[A-Za-z0-9.*>-]:)(?:[0-9]{4,5}|\*):(?!(?:[0-9A-Fa-f]{0,4}:){2,6}[0-9A-Fa-f]{0,4}(?:[^A-Za-z0-9:-]|$))"
        r"(?:\*|[A-Za-z_][A-Za-z0-9_-]{0,63})"
        rf":(?:\*|[A-Za-z_][A-Za-z0-9_.@-]{{0,63}}):({BARE}{{4,}})",
        (":",),
    ),
    Rule(
        "card",
        CARDS,
        rf"{_BEGINS}(?<![0-9]\.)(?:[2-6][0-9]{{12,18}}"
        rf"|[2-6][0-9]{{3}}{_GAP}[0-9]{{4}}{_GAP}[0-9]{{4}}{_GAP}[0-9]{{4}}(?:{_GAP}[0-9]{{1,3}})?"
        rf"|[2-6][0-9]{{3}}{_GAP}[0-9]{{6}}{_GAP}[0-9]{{4,6}}|[2-6][0-9]{{5}}{_GAP}[0-9]{{7,13}}"
        rf"|(?<![0-9]{_SEPARATOR})(?:[2-6][0-9](?:{_SEPARATOR}[0-9]{{2}}){{5,8}}(?:{_SEPARATOR}[0-9])?"
        rf"|[2-6](?:{_SEPARATOR}[0-9]){{12,18}}))(?![A-Za-z0-9])",
        tuple("0123456789"),
        card,
        _glued,
    ),
    Rule(
        "iban",
        IBANS,
        rf"{_BEGINS}(?:[A-Z]{{2}}[0-9]{{2}}(?:[ \u00a0\u202f-]?[A-Z0-9]{{4}}){{2,7}}"
        r"(?:[ \u00a0\u202f-]?[A-Z0-9]{1,3})?"
        r"|[A-Za-z]{2} ?[0-9]{2}(?: ?[A-Za-z0-9]{4}){2,7}(?: ?[A-Za-z0-9]{1,3})?)(?![A-Za-z0-9])",
        tuple("0123456789"),
        iban,
        _glued,
    ),
    Rule(
        "ssn",
        SSNS,
        rf"{_begins(word='A-Za-z0-9-')}(?!000|666|9)[0-9]{{3}}[-\u2010-\u2013](?!00)[0-9]{{2}}[-\u2010-\u2013](?!0000)"
        r"[0-9]{4}(?![A-Za-z0-9]|-[0-9])",
        tuple("0123456789"),
        None,
        _glued,
    ),
    Rule(
        "ssn",
        SSNS,
        r"(?i:social security(?: number)?|social|ssn)[ :#=is]{1,8}"
        r"([0-9]{3} [0-9]{2} [0-9]{4})(?![A-Za-z0-9])",
        ("ocial", "OCIAL", "SSN", "ssn"),
        None,
        _glued,
    ),
    Rule(
        "email",
        EMAILS,
        rf"{_ESCAPE_ENDS}({_LOCAL}{{1,64}}+(?<!^git)(?<![^A-Za-z0-9]git)(?<!\\[nrt]git)(?<!%{_HEX}{{2}}git)"
        rf"(?:@|%40)(?![0-9]x\.)(?:{_LABEL}(?:{_LABEL}|-){{0,62}}\.){{1,8}}"
        r"[A-Za-z\u00c0-\u04ff]{2,24})",
        ("@", "%40"),
        None,
        str.lower,
    ),
    Rule(
        "phone",
        PHONES,
        rf"{_begins(word='A-Za-z0-9+')}\+[1-9](?:[{_BLANK}()./{_DASH}]{{0,2}}[0-9]){{7,14}}(?![0-9])"
        rf"|{_begins(word='A-Za-z0-9.+-')}(?<![0-9][0-9] )(?:1{_GAP})?"
        rf"(?:\([2-9][0-9]{{2}}\)(?:{_GAP})?|[2-9][0-9]{{2}}{_GAP})"
        rf"[2-9][0-9]{{2}}{_GAP}[0-9]{{4}}(?![A-Za-z0-9]|[.-][0-9])",
        tuple("0123456789"),
        None,
        _glued,
    ),
    Rule(
        "phone",
        PHONES,
        rf"(?:[Pp]hone|PHONE)[a-z .:#]{{0,12}}([0-9(](?:[{_BLANK}()./{_DASH}]{{0,2}}[0-9]){{6,14}})(?![0-9])",
        ("hone", "HONE"),
        None,
        _glued,
    ),
    Rule(
        "ip",
        ADDRESSES,
        rf"{_begins(word='A-Za-z0-9.')}(?<![0-9A-Fa-f:]:)(?:[0-9A-Fa-f]{{0,4}}:){{2,8}}"
        rf"(?:{_OCTETS}(?![A-Za-z0-9])|[0-9A-Fa-f]{{0,4}}(?![A-Za-z0-9:]|\.[0-9]))"
        rf"|{_begins(word='A-Za-z0-9.')}(?<![A-Za-z]/)(?<![Vv]ersion )(?<![Rr]elease )"
        rf"{_OCTETS}(?![A-Za-z0-9]|\.[0-9])",
        (".", ":"),
        address,
    ),
)

# Applied to texts at the full level only. Words are kept, so that errors of one kind stay recognizable.
LONG_NUMBERS: Final = Rule("digits", 0, r"[0-9](?:[0-9]|[.,: _-](?=[0-9])){5,}", tuple("0123456789"))
# A quotation is replaced together with the markers in it.
QUOTATIONS: Final = (
    re.compile(r"\"(?:[^\"\\\n]|\\.)*(?:\"|(?=\n)|\\?\Z)", re.ASCII),
    re.compile(r"`[^`\n]*(?:`|(?=\n)|\Z)", re.ASCII),
    re.compile(
        rf"{_BEGINS}[BFRUbfru]{{0,2}}'(?:\\'|[^'\n]|(?<=[A-Za-z])'(?=[A-Za-z]))*'(?![A-Za-z0-9])", re.ASCII
    ),
    re.compile(
        r"[\u00ab\u2018\u201c\u201e][^\u00bb\u2019\u201c\u201d\n]*[\u00bb\u2019\u201c\u201d]?", re.ASCII
    ),
)
QUOTES: Final = "\"'`\u00ab\u00bb\u2018\u2019\u201c\u201d\u201e"

BUILT_IN: Final = (
    "redacted",
    "deep",
    "other",
    *dict.fromkeys(rule.name for rule in RULES),
    LONG_NUMBERS.name,
    "quoted",
)


class Compiled:
    """A rule. Its patterns are compiled at their first use: a process that ends soon needs few of them."""

    __slots__ = ("_flags", "_rule", "check", "fold", "group", "hint", "name", "search", "search_plain")

    search: Callable[..., "re.Match[str] | None"]
    search_plain: Callable[..., "re.Match[str] | None"]
    """The faster search for a text without escape sequences."""
    hint: Callable[[str], "re.Match[str] | None"]

    def __init__(self, rule: Rule, flags: int = re.ASCII) -> None:
        self.name, self.group, self.check, self.fold = rule.name, rule.group, rule.check, rule.fold
        self._rule, self._flags = rule, flags

    def __getattr__(self, name: str) -> Callable[..., "re.Match[str] | None"]:
        """Called for a slot that is empty."""
        pattern, flags = self._rule.pattern, self._flags
        match name:
            case "search":
                pass
            case "search_plain":
                for escapes in (_ESCAPE_ENDS, *map(_escapes, ("", "A", "AIza", "eyJ"))):
                    pattern = pattern.replace(escapes, "")
            case "hint":
                pattern, flags = "|".join(map(re.escape, self._rule.hints)), 0
            case _:
                raise AttributeError(name)
        found = re.compile(pattern, flags).search
        setattr(self, name, found)
        return found

    def __reduce__(self) -> tuple[type["Compiled"], tuple[Rule, int]]:
        return Compiled, (self._rule, self._flags)
