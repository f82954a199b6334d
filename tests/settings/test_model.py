"""Settings: sources, precedence, validation errors and secrets."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from qkit.errors import ConfigError
from qkit.settings import error_messages, rules
from qkit.settings.model import (
    BreakerSettings,
    DeadLetterSettings,
    RetrySettings,
    Settings,
    SettingsValues,
    ShutdownSettings,
)
from tests.support.docstrings import attributes

CANARY = "c4n4ry-s3cr3t"
AMQP = "amqp://user:password@host:5672/vhost"
BROKERS = "host1:9092,host2:9092"
REDIS = "redis://user:password@host:6379/0"
REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("QKIT_")]:
        monkeypatch.delenv(name)


def make(**values: Any) -> Settings:
    return Settings(**values)


# Defaults and sources


@pytest.mark.proves(
    "000-config-1",
    "000-config-3",
    "000-config-4",
    "000-config-5",
    "000-config-6",
    "003-retry-8",
    "003-retry-9",
    "003-retry-10",
    "003-shutdown-3",
    "003-compat-2",
    "003-compat-4",
)
def test_the_defaults_match_the_documentation() -> None:
    settings = Settings()
    assert settings.type == "native"
    assert settings.retry == RetrySettings(
        enabled=True, max_attempts=3, initial_delay=1.0, multiplier=2.0, max_delay=60.0, jitter=0.1
    )
    assert settings.dead_letter == DeadLetterSettings(enabled=True, max_size=10_000, suffix=None)
    assert settings.shutdown == ShutdownSettings(timeout=30.0)
    assert settings.breaker == BreakerSettings(failure_threshold=5, recovery_timeout=30.0)
    assert (settings.send_timeout, settings.ack_deadline, settings.replicas) == (10.0, 30.0, 1)
    assert (settings.max_depth, settings.max_priority, settings.fsync) == (100_000, 9, "always")
    assert settings.max_message_bytes == 1_048_576
    assert settings.default_priority == 5


def test_keyword_arguments_override_variables_which_override_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "qkit.toml"
    file.write_text(
        "prefetch = 1\nsend_timeout = 1\nreplicas = 1\nprefix = 'file.'\n"
        "[retry]\nmax_attempts = 1\njitter = 0.01\nmax_delay = 1\n"
    )
    monkeypatch.setenv("QKIT_PREFETCH", "2")
    monkeypatch.setenv("QKIT_SEND_TIMEOUT", "2")
    monkeypatch.setenv("QKIT_RETRY__MAX_ATTEMPTS", "2")
    monkeypatch.setenv("QKIT_RETRY__JITTER", "0.02")
    for given in ({"max_attempts": 3}, RetrySettings(max_attempts=3)):
        settings = Settings.load(file, prefetch=3, retry=given)
        assert (settings.prefetch, settings.send_timeout, settings.prefix) == (3, 2.0, "file.")
        assert settings.retry == RetrySettings(max_attempts=3, jitter=0.02, max_delay=1)


def test_a_section_argument_leaves_the_variables_of_its_other_fields_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QKIT_RETRY__INITIAL_DELAY", "7")
    retry = Settings(retry=RetrySettings(max_attempts=3, multiplier=2.0)).retry
    assert (retry.max_attempts, retry.initial_delay) == (3, 7.0)
    # A value that equals the default is still an argument, and overrides the variable.
    assert Settings(retry=RetrySettings(initial_delay=1.0)).retry.initial_delay == 1.0
    assert Settings(retry=RetrySettings()).retry.initial_delay == 7.0


def test_a_section_of_the_wrong_class_is_rejected() -> None:
    with pytest.raises(ConfigError, match="retry"):
        make(retry=ShutdownSettings())


def test_settings_do_not_read_a_file_that_was_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qkit.toml").write_text("prefetch = 30\n")
    monkeypatch.chdir(tmp_path)
    assert Settings().prefetch is None


def test_a_variable_may_hold_a_section_as_json_and_an_empty_one_is_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QKIT_RETRY", '{"max_attempts": 7}')
    monkeypatch.setenv("QKIT_URL", "")
    assert Settings().retry.max_attempts == 7


def test_qkit_variables_that_are_not_settings_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QKIT_TEST_REDIS_URL", "QKIT_TOKEN", "QKIT_SERVICE_HOST"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("QKIT_PORT_6379_TCP_ADDR", "10.0.0.1")
    assert Settings() == Settings(type="native")


def test_a_variable_names_the_file_that_arguments_and_variables_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "app.toml"
    file.write_text("prefetch = 20\nsend_timeout = 3\nack_deadline = 7\n")
    monkeypatch.setenv("QKIT_CONFIG", str(file))
    monkeypatch.setenv("QKIT_SEND_TIMEOUT", "4")
    settings = Settings(ack_deadline=8)
    assert (settings.prefetch, settings.send_timeout, settings.ack_deadline) == (20, 4, 8)
    other = tmp_path / "other.toml"
    other.write_text("")
    assert Settings.load(other).prefetch is None  # the given file replaces QKIT_CONFIG
    monkeypatch.setenv("QKIT_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        Settings()
    monkeypatch.setenv("QKIT_CONFIG", "")
    assert Settings().prefetch is None


@pytest.mark.parametrize("table", ["", "[qkit]\n"])
def test_a_file_has_the_fields_at_the_top_level_or_in_a_table(tmp_path: Path, table: str) -> None:
    file = tmp_path / "app.toml"
    file.write_text(f"{table}type = 'kafka'\nurl = 'a:9092, b:9092'\n")
    settings = Settings.load(str(file))
    assert settings.url == SecretStr("a:9092,b:9092")


def test_other_tables_of_a_shared_file_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text(
        "title = 'app'\n[qkit]\nprefetch = 5\n[qkit.retry]\nmax_attempts = 2\n[other]\n"
    )
    settings = Settings.load(file)
    assert (settings.prefetch, settings.retry.max_attempts) == (5, 2)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ["qkit.toml", "No such file"]),
        (b"prefetch = 1\nurl = \n", ["qkit.toml", "line 2"]),
        (b"prefetch = 1\nurl = ", ["qkit.toml", "line 2"]),
        (b"prefetch = 1\nprefix = '\xff'", ["qkit.toml", "line 2", "UTF-8"]),
        (b"prefetch = 0", ["prefetch (in ", "qkit.toml)", "from 1 to 1000"]),
        (b"[retry]\nmax_attemps = 3", ["retry.max_attemps (in ", "'max_attempts'"]),
    ],
)
def test_an_error_names_the_invalid_file_and_the_line(
    tmp_path: Path, content: bytes | None, expected: list[str]
) -> None:
    file = tmp_path / "qkit.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Settings.load(file)
    for word in expected:
        assert word in str(caught.value)


# Validation errors


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "rabit"}, ["type", "native, rabbitmq, kafka, redis", "'rabit'"]),
    ({"type": 5}, ["type", "native, rabbitmq, kafka, redis", "a str"]),
    ({"type": "rabbitmq"}, ["url: missing", "a str", AMQP, "default: none", "QKIT_URL"]),
    ({"type": "kafka"}, ["url: missing", BROKERS]),
    ({"type": "redis", "mode": "list"}, ["url: missing", REDIS]),
    ({"type": "rabbitmq", "url": "http://host"}, ["amqp:// or amqps://", AMQP]),
    ({"type": "rabbitmq", "url": ""}, ["empty", AMQP]),
    ({"type": "rabbitmq", "url": "amqp://u:p/w@host"}, ["percent-encode", AMQP]),
    ({"type": "rabbitmq", "url": "amqp://u:p#w@host"}, ["percent-encode", AMQP]),
    ({"type": "rabbitmq", "url": "amqp://host:99999/"}, ["port", AMQP]),
    ({"type": "rabbitmq", "url": "amqp://ho st/"}, ["space", AMQP]),
    ({"type": "rabbitmq", "url": ["amqp://h"]}, ["url: expected a str", "type list"]),
    ({"type": "kafka", "url": ""}, ["empty", BROKERS]),
    ({"type": "kafka", "url": "a:9092 b:9092"}, ["commas", BROKERS]),
    ({"type": "kafka", "url": "a:9092,b"}, ["broker 2", BROKERS]),
    ({"type": "kafka", "url": "kafka://a:9092"}, ["no scheme", BROKERS]),
    ({"type": "redis", "mode": "list", "url": "host:6379"}, ["redis:// or rediss://", REDIS]),
    ({"type": "redis", "mode": "list", "url": "redis://h/main"}, ["database number"]),
    ({"type": "redis", "mode": "lists", "url": REDIS}, ["mode", "'list', 'pubsub'", "'lists'"]),
    ({"type": "redis", "mode": "pubsub", "url": REDIS, "reliable": True}, ["mode='list'"]),
    ({"type": "redis", "mode": "pubsub", "url": REDIS, "ack_deadline": 5}, ["leases"]),
    ({"type": "redis", "mode": "pubsub", "url": REDIS, "replicas": 2}, ["replicas", "pub/sub"]),
    ({"url": AMQP}, ["url: belongs to rabbitmq, kafka and redis", "(the default)", "'rabbitmq'"]),
    ({"type": "native", "url": "a:9092"}, ["native takes a path"]),
    ({"type": "native", "mode": "list"}, ["mode: belongs to redis", "'native'"]),
    ({"type": "rabbitmq", "url": AMQP, "partitions": 3}, ["partitions: belongs to kafka"]),
    ({"type": "kafka", "url": BROKERS, "path": "data"}, ["path: belongs to native"]),
    ({"type": "rabbitmq", "url": AMQP, "ack_deadline": 5}, ["belongs to native and redis"]),
    ({"replicas": 2}, ["replicas: native stores one copy"]),
    ({"fsync": "never"}, ["fsync: has no effect in memory", "path"]),
    ({"path": "data", "fsync_interval": 2.0}, ["fsync='interval'"]),
    ({"path": ""}, ["path: is empty", "memory only"]),
    ({"path": __file__}, ["path: is a file"]),
    (
        {"prefetch": "many"},
        ["prefetch: expected an int from 1 to 1000", "type str", "500 on kafka"],
    ),
    ({"prefetch": True}, ["prefetch", "int", "got True"]),
    ({"prefetch": 1001}, ["from 1 to 1000", "1001"]),
    ({"send_timeout": 0}, ["send_timeout: expected a float above 0", "default: 10.0"]),
    ({"send_timeout": float("nan")}, ["send_timeout", "nan"]),
    ({"compression": True}, ["compression: expected 'gzip' or none", "got True"]),
    ({"prefix": "a b"}, ["prefix", "letters, digits"]),
    ({"reliable": "perhaps", "type": "redis", "mode": "list", "url": REDIS}, ["a bool"]),
    ({"retry": 5}, ["retry: expected a RetrySettings", "max_attempts"]),
    ({"retry": {"max_attemps": 5}}, ["retry.max_attemps", "did you mean 'max_attempts'"]),
    ({"retry": {"max_attempts": 0}}, ["retry.max_attempts", "at least 1", "default: 3"]),
    ({"retry": {"jitter": 0.5}}, ["retry.jitter: expected a float from 0 to 0.1"]),
    ({"retry": {"mode": "later"}}, ["retry.mode", "'release', 'inline'", "default: 'release'"]),
    ({"dead_letter": {"suffix": "a/b"}}, ["dead_letter.suffix", "'_dlq'"]),
    ({"prefech": 5}, ["prefech", "did you mean 'prefetch'"]),
    ({"maxAttempts": 5}, ["did you mean 'retry.max_attempts'"]),
    ({"_env_file": ".env"}, ["_env_file: unknown setting"]),
    ({"type": "kafka", "url": BROKERS, "sasl_username": "u"}, ["sasl_password: missing"]),
    ({"type": "kafka", "url": BROKERS, "tls_ca_file": "nowhere.pem"}, ["no such file"]),
    ({"type": "kafka", "url": BROKERS, "tls_key_file": __file__}, ["tls_cert_file: missing"]),
    ({"type": "rabbitmq", "url": AMQP, "tls_ca_file": __file__}, ["amqps://"]),
]


@pytest.mark.proves(
    "000-config-8",
    "000-replication-1",
    "002-place-3",
    "003-config-1",
    "003-config-2",
    "003-config-5",
    "003-config-6",
    "003-config-7",
    "003-config-8",
    "003-config-9",
    "003-config-10",
)
@pytest.mark.parametrize(("values", "expected"), BAD, ids=[str(row[0])[:60] for row in BAD])
def test_an_error_says_what_is_wrong_and_what_to_do(
    values: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    for word in expected:
        assert word in str(caught.value)


@pytest.mark.proves("003-config-1")
def test_one_error_lists_every_problem_on_its_own_line() -> None:
    with pytest.raises(ConfigError) as caught:
        make(tpye="kafka", prefetch=0, mode="list", retry={"jitter": 2, "max_attempts": "x"})
    heading, *lines = str(caught.value).splitlines()
    assert heading == "5 problems in the settings:"
    assert [line.split(":")[0].strip(" -") for line in lines] == [
        "tpye",
        "mode",
        "prefetch",
        "retry.max_attempts",
        "retry.jitter",
    ]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QKIT_PREFECH", "5", ["QKIT_PREFECH", "did you mean QKIT_PREFETCH?"]),
        ("QKIT_RETRY_MAX_ATTEMPTS", "5", ["did you mean QKIT_RETRY__MAX_ATTEMPTS?"]),
        ("QKIT_RETRY__MAX_ATEMPTS", "5", ["(from QKIT_RETRY__MAX_ATEMPTS)", "'max_attempts'"]),
        ("QKIT_ZZZ", "5", ["QKIT_ZZZ: unknown environment variable; remove it"]),
        ("QKIT_PREFETCH", "ten", ["prefetch (from QKIT_PREFETCH): expected an int"]),
        ("QKIT_RETRY", "often", ["retry (from QKIT_RETRY): expected a RetrySettings"]),
        ("QKIT_MODE", "list", ["mode (from QKIT_MODE): belongs to redis"]),
    ],
)
def test_an_error_names_the_invalid_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        Settings()
    for word in expected:
        assert word in str(caught.value)


def test_an_invalid_section_raises_a_config_error() -> None:
    bad: dict[str, Any] = {"max_attempts": 0, "multiplyer": 3}
    with pytest.raises(ConfigError) as caught:
        RetrySettings(**bad)
    assert "2 problems in RetrySettings" in str(caught.value)
    assert "did you mean 'multiplier'" in str(caught.value)


def test_settings_and_sections_are_immutable() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.prefetch = 5
    with pytest.raises(ValidationError, match="frozen"):
        settings.retry.max_attempts = 5


# Redis and its mode


@pytest.mark.proves("003-compat-5", "003-compat-6", "003-compat-7")
def test_redis_without_a_mode_means_pubsub_and_warns(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.warns(DeprecationWarning, match="Set mode='list' or mode='pubsub'") as caught:
        settings = Settings(type="redis", url=REDIS)
    assert settings.mode == "pubsub"
    assert caught[0].filename == __file__
    assert "explicitly" in caplog.text
    file = tmp_path / "qkit.toml"
    file.write_text(f"type = 'redis'\nurl = '{REDIS}'")
    with pytest.warns(DeprecationWarning, match="mode") as caught:
        Settings.load(file)
    assert caught[0].filename == __file__


@pytest.mark.proves("003-compat-4", "003-compat-7")
def test_an_explicit_mode_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Settings(type="redis", url=REDIS, mode="list").mode == "list"


# Add-on backends


@pytest.mark.proves("003-config-3")
def test_a_registered_backend_is_accepted_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    added = metadata.EntryPoints([metadata.EntryPoint("nats", "x:y", "qkit.backends")])
    groups: list[str] = []

    def entry_points(*, group: str) -> metadata.EntryPoints:
        groups.append(group)
        return added

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    Settings(type="native")
    assert groups == []
    settings = Settings(type="nats", url="nats://u:p@host", path="data")
    assert (settings.backend_key, settings.effective_prefetch) == ("nats", 10)
    with pytest.raises(ConfigError, match="redis, nats"):
        Settings(type="natz")


# Derived values


@pytest.mark.proves("000-config-7", "003-dlq-5", "003-redis-1", "003-speed-1", "003-speed-4")
@pytest.mark.parametrize(
    ("values", "key", "prefetch", "dead_letters"),
    [
        ({"type": "native"}, "native-memory", 10, "orders_dlq"),
        ({"type": "native", "path": "data"}, "native-durable", 10, "orders_dlq"),
        ({"type": "rabbitmq", "url": AMQP}, "rabbitmq", 1, "orders.dlq"),
        ({"type": "kafka", "url": BROKERS}, "kafka", 500, "orders.dlq"),
        ({"type": "redis", "url": REDIS, "mode": "list"}, "redis-list", 10, "orders.dlq"),
        (
            {"type": "redis", "url": REDIS, "mode": "list", "reliable": False},
            "redis-list-unreliable",
            10,
            "orders.dlq",
        ),
        ({"type": "redis", "url": REDIS, "mode": "pubsub"}, "redis-pubsub", 10, "orders.dlq"),
        ({"type": "native", "prefetch": 7}, "native-memory", 7, "orders_dlq"),
        ({"dead_letter": {"suffix": "-dead"}}, "native-memory", 10, "orders-dead"),
    ],
)
def test_backend_key_prefetch_and_dead_letter_name_depend_on_the_backend(
    values: dict[str, Any], key: str, prefetch: int, dead_letters: str
) -> None:
    settings = make(**values)
    assert settings.backend_key == key
    assert settings.effective_prefetch == prefetch
    assert settings.dead_letter_name("orders") == dead_letters


@pytest.mark.parametrize(
    ("values", "encrypted"),
    [
        ({"type": "native"}, False),
        ({"type": "rabbitmq", "url": AMQP}, False),
        ({"type": "rabbitmq", "url": "amqps://host", "tls_ca_file": __file__}, True),
        ({"type": "redis", "mode": "list", "url": "rediss://host"}, True),
        ({"type": "kafka", "url": BROKERS}, False),
        ({"type": "kafka", "url": BROKERS, "tls": True}, True),
        ({"type": "kafka", "url": BROKERS, "tls_ca_file": __file__}, True),
    ],
)
def test_uses_tls_depends_on_the_url_and_the_tls_settings(
    values: dict[str, Any], encrypted: bool
) -> None:
    assert make(**values).uses_tls is encrypted


# Secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"amqp://guest:{CANARY}@host:5672/v", "amqp://guest:***@host:5672/v"),
        (f"redis://:{CANARY}@host/0", "redis://:***@host/0"),
        (f"redis://host/0?password={CANARY}&db=1", "redis://host/0?password=***&db=***"),
        (f"amqp://u:a@{CANARY}@host", "amqp://u:***@host"),
        (f"amqp://u:a#{CANARY}@host", "amqp://u:***@host"),
        (f"u:{CANARY}@host:9092", "u:***@host:9092"),
        ("amqp://guest@host", "amqp://***@host"),
        ("a:9092,b:9092", "a:9092,b:9092"),
        (f"redis://{'a' * 100}:pa$s?x@host", "redis://***"),  # checked in linear time
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert rules.mask_url(url) == shown


def representations(settings: Settings) -> list[str]:
    return [
        repr(settings),
        str(settings),
        f"{settings}",
        repr(settings.model_dump()),
        settings.model_dump_json(),
        repr(settings.model_dump(mode="json")),
        str(settings.safe_url),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"type": "rabbitmq", "url": f"amqp://user:{CANARY}@host:5672/vhost"},
        {"type": "redis", "mode": "list", "url": f"redis://:{CANARY}@host:6379/0"},
        {
            "type": "kafka",
            "url": BROKERS,
            "sasl_mechanism": "PLAIN",
            "sasl_username": "user",
            "sasl_password": CANARY,
        },
    ],
)
def test_secrets_are_hidden_but_kept(
    values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        settings = make(**values)
    assert all(CANARY not in text for text in [*representations(settings), caplog.text])
    secret = settings.sasl_password or settings.url
    assert secret is not None
    assert CANARY in secret.get_secret_value()
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings
    assert make(**settings.model_dump(exclude_unset=True)) == settings


@pytest.mark.parametrize(
    "values",
    [
        {"type": f"amqp://user:{CANARY}@host"},
        {"type": "rabbitmq", "url": f"http://user:{CANARY}@host"},
        {"type": "rabbitmq", "url": f"amqp://user:{CANARY}/{CANARY}@host"},
        {"type": "rabbitmq", "url": f"amqp://user:{CANARY}", "prefetch": 0},
        {"type": "rabbitmq", "url": {CANARY: CANARY}},
        {"type": "rabbitmq", "url": f"amqp://user:{CANARY}@host", "prefetch": CANARY},
        {"type": "rabbitmq", "url": "amqps://host", "tls_key_file": CANARY},
        {"type": "kafka", "url": f"user:{CANARY}@host:9092"},
        {"type": "kafka", "url": BROKERS, "sasl_pasword": CANARY},
        {"type": "kafka", "url": BROKERS, "sasl_password": [CANARY]},
        {"type": "redis", "mode": "list", "url": f"redis://:{CANARY}@host/{CANARY}"},
        {"url": f"amqp://user:{CANARY}@host"},
        {"retry": {"max_attempts": CANARY}},
        {"retry": CANARY},
    ],
)
def test_no_error_contains_a_secret(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_no_error_contains_a_numeric_password() -> None:
    with pytest.raises(ConfigError) as caught:
        make(type="kafka", url=BROKERS, sasl_password=31337, sasl_username="u")
    assert "31337" not in str(caught.value)


@pytest.mark.parametrize("fault", [f"sasl_password = {CANARY}".encode(), b"prefix = '\xff'"])
def test_an_error_about_an_invalid_file_does_not_show_its_content(
    tmp_path: Path, fault: bytes
) -> None:
    file = tmp_path / "qkit.toml"
    file.write_bytes(f"url = 'amqp://u:{CANARY}@host'\n".encode() + fault)
    with pytest.raises(ConfigError) as caught:
        Settings.load(file)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_settings_inside_another_model_hide_their_input() -> None:
    class App(BaseModel):
        queue: Settings

    with pytest.raises(ValidationError) as caught:
        App.model_validate({"queue": {"type": "kafka", "url": CANARY}})
    assert "host1:9092" in str(caught.value)


# The reference page


def rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    descriptions = attributes(model)
    for name, info in model.model_fields.items():
        if error_messages.is_section(info.annotation):
            found += rows(info.annotation, f"{prefix}{name}.")
            continue
        owners = ", ".join(rules.BACKENDS_BY_FIELD.get(name, ())) if not prefix else ""
        found.append(
            f"| `{prefix}{name}` | {error_messages.expected(info)} "
            f"| {error_messages.default(name, info)} "
            f"| {owners or 'all'} | {descriptions[name].replace('``', '`')} |"
        )
    return found


@pytest.mark.proves("003-docs-3")
def test_the_reference_page_matches_every_field() -> None:
    page = [line for line in REFERENCE.read_text().splitlines() if line.startswith("| `")]
    assert page == rows(Settings), "docs/configuration.md should contain:\n" + "\n".join(
        rows(Settings)
    )


@pytest.mark.proves("003-docs-8")
def test_settings_values_has_every_field() -> None:
    assert list(SettingsValues.__annotations__) == list(Settings.model_fields)


def test_every_field_in_the_table_of_backends_exists() -> None:
    assert set(rules.BACKENDS_BY_FIELD) <= set(Settings.model_fields)
