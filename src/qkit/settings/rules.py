"""Rules for combinations of settings and for broker URLs.

The rules check raw values, before pydantic does, so that one error can list every problem.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from urllib.parse import urlsplit

from pydantic import SecretStr

from qkit.settings.error_messages import Problem

Values = Mapping[str, object]

BACKENDS = ("native", "rabbitmq", "kafka", "redis")
EXAMPLES = {
    "rabbitmq": "amqp://user:password@host:5672/vhost",
    "kafka": "host1:9092,host2:9092",
    "redis": "redis://user:password@host:6379/0",
}
_SCHEMES = {
    "rabbitmq": ("amqp", "amqps"),
    "redis": ("redis", "rediss"),
    "management": ("http", "https"),
}

# Backends that support a field; a field that is not listed applies to all backends.
BACKENDS_BY_FIELD: dict[str, tuple[str, ...]] = {
    "url": ("rabbitmq", "kafka", "redis"),
    "ack_deadline": ("native", "redis"),
    "path": ("native",),
    "fsync": ("native",),
    "fsync_interval": ("native",),
    "memory_limit": ("native",),
    "max_depth": ("native",),
    "max_priority": ("native",),
    "mode": ("redis",),
    "reliable": ("redis",),
    "batch_size": ("kafka",),
    "partitions": ("kafka",),
    "group_prefix": ("kafka",),
    "sasl_mechanism": ("kafka",),
    "sasl_username": ("kafka",),
    "sasl_password": ("kafka",),
    "tls": ("kafka",),
    "tls_ca_file": ("rabbitmq", "kafka", "redis"),
    "tls_cert_file": ("rabbitmq", "kafka", "redis"),
    "tls_key_file": ("rabbitmq", "kafka", "redis"),
    "management_url": ("rabbitmq",),
}
_TLS_FILES = ("tls_ca_file", "tls_cert_file", "tls_key_file")


def check_combinations(values: Values) -> list[Problem]:
    """Return problems with fields of other backends, URLs, modes, replicas and files."""
    kind = values.get("type", "native")
    if not isinstance(kind, str) or not _is_backend(kind):
        return [(("type",), _unsupported(kind))]
    if kind not in BACKENDS:
        return []  # an add-on backend checks its own settings
    given = {name for name, value in values.items() if value is not None}
    problems: list[Problem] = [
        ((name,), _wrong_backend(name, kind, values))
        for name in BACKENDS_BY_FIELD
        if name in given and kind not in BACKENDS_BY_FIELD[name]
    ]
    problems += _check_url(kind, values.get("url"))
    match kind:
        case "native":
            problems += _check_native(values, given)
        case "redis":
            problems += _check_redis(values, given)
        case "kafka":
            problems += _check_sasl(given)
        case "rabbitmq":
            problems += _check_management(values.get("management_url"))
        case _:
            pass
    return problems + (_check_tls(kind, values, given) if kind != "native" else [])


def _is_backend(kind: str) -> bool:
    return kind in BACKENDS or kind in _added_backends()


def _added_backends() -> set[str]:
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return set(entry_points(group="qkit.backends").names) - set(BACKENDS)


def _unsupported(kind: object) -> str:
    shown = "another value"
    if isinstance(kind, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,32}", kind):
        shown = repr(kind)
    supported = ", ".join([*BACKENDS, *sorted(_added_backends())])
    return f"expected one of {supported} (a str, default: 'native'), got {shown}"


def _wrong_backend(name: str, kind: str, values: Values) -> str:
    *others, last = BACKENDS_BY_FIELD[name]
    owners = f"{', '.join(others)} and {last}" if others else last
    chosen = repr(kind) if "type" in values else f"{kind!r} (the default)"
    text = f"belongs to {owners}, but type is {chosen}; remove it or change the type"
    if name == "url":
        guess = next(
            (to for to in EXAMPLES if _scheme(url_text(values)) in _SCHEMES.get(to, ())), ""
        )
        return f"{text} to {guess!r}" if guess else f"{text}; native takes a path instead"
    return text


def _check_url(kind: str, url: object) -> list[Problem]:
    """Check the URL; the problem never contains it, because the fault may be in the password."""
    if kind not in EXAMPLES or not isinstance(url, (str, SecretStr, NoneType)):
        return []
    example = EXAMPLES[kind]
    if url is None:
        text = f"missing, and type={kind!r} needs it: a str such as {example} (default: none)"
        return [(("url",), f"{text}; pass url=… or set QKIT_URL")]
    text = url if isinstance(url, str) else url.get_secret_value()
    fault = _broker_list_fault(text) if kind == "kafka" else _url_fault(kind, text)
    return [(("url",), f"{fault}; write it like {example}")] if fault else []


def _broker_list_fault(text: str) -> str | None:
    if not text.strip():
        return "the list of brokers is empty"
    for number, broker in enumerate(text.split(","), 1):
        host, _, port = broker.strip().rpartition(":")
        if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", host) or not _is_port(port):
            return f"broker {number} is not host:port, with commas between brokers and no scheme"
    return None


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) < 65_536


def _url_fault(kind: str, text: str) -> str | None:
    schemes = " or ".join(f"{scheme}://" for scheme in _SCHEMES[kind])
    if not text.strip():
        return "the URL is empty"
    if _scheme(text) not in _SCHEMES[kind]:
        return f"the URL must begin with {schemes}"
    if re.search(r"[\s\x00-\x1f\x7f]", text):
        return "the URL contains a space or control character; percent-encode it"
    try:
        parts = urlsplit(text)
        path = parts.path if parts.hostname and parts.port != 0 and "@" not in parts.path else None
    except ValueError:
        path = None
    if path is None:
        return "the URL has no valid host or port (percent-encode @ : / # ? in the password)"
    if kind == "redis" and not re.fullmatch(r"/?[0-9]*", path):
        return "the path of the URL must be a database number"
    return None


def _check_management(url: object) -> list[Problem]:
    if not isinstance(url, (str, SecretStr)):
        return []
    fault = _url_fault("management", url if isinstance(url, str) else url.get_secret_value())
    example = "http://user:password@host:15672"
    return [(("management_url",), f"{fault}; write it like {example}")] if fault else []


def _check_native(values: Values, given: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    if _several(values.get("replicas", 1)):
        text = "native stores one copy; use 1, or a broker that replicates (rabbitmq, kafka, redis)"
        problems.append((("replicas",), text))
    path = values.get("path")
    if path is None:
        problems += [
            ((name,), "has no effect in memory; set a path, or remove it")
            for name in ("fsync", "fsync_interval", "memory_limit")
            if name in given
        ]
    elif isinstance(path, (str, Path)):
        if not str(path).strip() or "\0" in str(path):
            text = "is empty or contains NUL; name a directory, or remove it for memory only"
            problems.append((("path",), text))
        elif Path(path).exists() and not Path(path).is_dir():
            problems.append((("path",), "is a file; name a directory, which is created if missing"))
    if path is not None and "fsync_interval" in given and values.get("fsync") != "interval":
        problems.append((("fsync_interval",), "has no effect without fsync='interval'"))
    return problems


def _check_redis(values: Values, given: set[str]) -> list[Problem]:
    stores_messages = values.get("mode") == "list"
    has_leases = stores_messages and str(values.get("reliable", True)).lower() not in {
        "false",
        "0",
        "no",
        "off",
    }
    problems: list[Problem] = []
    if "reliable" in given and not stores_messages:
        problems.append((("reliable",), "belongs to mode='list'; set that, or remove it"))
    if "ack_deadline" in given and not has_leases:
        text = "leases need mode='list' and reliable=true; set those, or remove it"
        problems.append((("ack_deadline",), text))
    if _several(values.get("replicas", 1)) and not stores_messages:
        text = "pub/sub stores no messages to replicate; use 1, or mode='list'"
        problems.append((("replicas",), text))
    return problems


def _check_sasl(given: set[str]) -> list[Problem]:
    names = ("sasl_mechanism", "sasl_username", "sasl_password")
    if not given & set(names):
        return []
    text = f"missing; set {', '.join(names)} together (a str, default: none)"
    return [((name,), text) for name in names if name not in given]


def _check_tls(kind: str, values: Values, given: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    secure = {"rabbitmq": "amqps", "redis": "rediss"}.get(kind)
    for name in _TLS_FILES:
        value = values.get(name)
        if name in given and secure is not None and _scheme(url_text(values)) != secure:
            problems.append(((name,), f"has an effect only with {secure}://; change the url"))
        elif isinstance(value, (str, Path)) and ("\0" in str(value) or not Path(value).is_file()):
            # The value is not shown: it may be a key that was pasted instead of a path.
            problems.append(((name,), "no such file; give the path of a PEM file"))
    if "tls_key_file" in given and "tls_cert_file" not in given:
        problems.append((("tls_cert_file",), "missing; a tls_key_file needs its certificate"))
    return problems


def _several(replicas: object) -> bool:
    return re.fullmatch("0*([2-9]|[1-9][0-9]+)", str(replicas)) is not None


def _scheme(url: str) -> str:
    head, colon, _ = url.partition("://")
    return head.lower() if colon else ""


def url_text(values: Values) -> str:
    """Return the URL with its password; do not use it in messages."""
    url = values.get("url")
    return url.get_secret_value() if isinstance(url, SecretStr) else str(url or "")


def mask_url(url: str) -> str:
    """Replace credentials, the values of query parameters and the fragment with ``***``.

    Everything before the last ``@`` counts as credentials, so that a password with unescaped
    characters is hidden too. A user name is shown only if a password follows it: in
    ``redis://secret@host`` it may be the password. This may hide too much, but it never shows part
    of a password.

    >>> mask_url("amqp://guest:pa@ss@host:5672/shop?heartbeat=5")
    'amqp://guest:***@host:5672/shop?heartbeat=***'
    >>> mask_url("redis://secret@host:6379/0")
    'redis://***@host:6379/0'
    """
    head, colon, rest = url.partition("://")
    if not colon:
        head, rest = "", url
    start, mark, _ = rest.partition("?")
    tail = ""
    if mark and "@" not in start:  # an @ in the query is part of a parameter
        if "@" in rest and not _HOSTS.fullmatch(start):
            return f"{head}{colon}***"  # or the password contains an unescaped question mark
        rest, tail = start, rest[len(start) :]
    credentials, at, place = rest.rpartition("@")
    place += tail
    user, separator, _ = credentials.partition(":")
    hidden = f"{user}:***" if separator and "@" not in user else "***" if at else ""
    place, fragment_mark, _ = place.partition("#")
    place, _, query = place.partition("?")
    pairs = [part.partition("=") for part in re.split("[&;]", query) if part]
    shown = "&".join(f"{name}=***" if equals else "***" for name, equals, _ in pairs)
    fragment = "#***" if fragment_mark else ""
    return f"{head}{colon}{hidden}{at}{place}{'?' if shown else ''}{shown}{fragment}"


# Hosts with ports, separated by commas, and a path.
_HOST = r"(\[[0-9A-Fa-f:.]*\]|[A-Za-z0-9._-]*)(:[0-9]+)?"
_HOSTS = re.compile(rf"{_HOST}(,{_HOST})*(/[^?#@]*)?")
