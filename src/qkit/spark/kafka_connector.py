"""Kafka at cluster scale: qkit's wire format for Spark's own connector, made and read by Spark.

No row passes through Python on this way. What the connector cannot carry (validation, delays,
compression by qkit) goes through the data source instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qkit._internal.names import check_name
from qkit.errors import Unsupported
from qkit.settings.model import Settings
from qkit.spark.columns import VALUE, columns_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["connector_options", "from_kafka_frame", "has_connector", "kafka_frame", "suits"]

_OWN: Final = (
    "'qkit-id', 'qkit-attempt', 'qkit-not-before', 'qkit-expires-at', 'qkit-removed', "
    "'qkit-original-topic', 'qkit-original-partition', 'qkit-original-offset'"
)
_PROVIDER: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_MARGIN: Final = 128 << 10  # beside the body: headers, and the frame around them
_CONNECTOR: Final = frozenset({"key", "ttl", "headers", "channel", "broadcast"})


def kafka_frame(
    df: DataFrame, channel: str, *, settings: Settings | None = None, **columns: str
) -> DataFrame:
    """``topic``, ``key``, ``value`` and ``headers`` for ``df.write.format("kafka")``.

    Columns mean what they mean to ``format("qkit")``; ``columns`` says which are the ``key``,
    ``ttl`` and ``headers`` where there is no ``value`` column. The consumer of any qkit service
    reads what is written. Raises ``Unsupported`` for priorities and delays, ``ConfigError``.
    """
    found = columns_of(df.schema, columns)
    chosen = dict(found.metadata)
    for name in ("priority", "delay"):
        if name in chosen:
            raise Unsupported(
                f"the column {chosen[name]!r} is the message's {name}, which Spark's connector "
                "cannot carry: drop it, or write with format('qkit')",
                backend="kafka",
                operation="send",
                queue=channel,
            )
    body = {
        "row": "to_json(struct(*), map('ignoreNullFields', 'false'))",
        "struct": f"to_json({VALUE}, map('ignoreNullFields', 'false'))",
    }.get(found.kind, VALUE)
    topic = check_name(channel) if settings is None else settings.broker_name(check_name(channel))
    headers = [_header("qkit-id", _ID)]
    if found.kind == "bytes":
        headers.append(_header("content-type", "'application/octet-stream'"))
    optional = [f"array({', '.join(headers)})"]
    if "ttl" in chosen:
        at = f"unix_millis(current_timestamp()) + ceil({_column(chosen['ttl'])} * 1000)"
        some = f"array({_header('qkit-expires-at', f'string({at})')})"
        optional.append(f"if({_column(chosen['ttl'])} is null, {_NO_HEADERS}, {some})")
    if "headers" in chosen:
        entries = f"map_entries({_column(chosen['headers'])})"
        optional.append(
            f"coalesce(transform({entries}, e -> {_header_of('e.key', 'e.value')}), {_NO_HEADERS})"
        )
    key = f"binary({_column(chosen['key'])})" if "key" in chosen else "cast(null as binary)"
    return df.selectExpr(
        f"'{topic}' as topic",
        f"{key} as key",
        f"binary({body}) as value",
        f"concat({', '.join(optional)}) as headers",
    )


# UUIDv7 without dashes, as ``new_id`` makes them. Spark's uuid() is the same in a retried task.
_ID: Final = (
    "concat(lpad(lower(hex(unix_millis(current_timestamp()))), 12, '0'), '7', "
    "regexp_replace(uuid(), '^(.{8})-(.{3}).-(.{3}).-.{4}-(.{4})(.{8})$', '$2' || '8' || '$3$4$5'))"
)
_NO_HEADERS: Final = "cast(array() as array<struct<key: string, value: binary>>)"


def _header(name: str, value: str) -> str:
    return _header_of(f"'{name}'", value)


def _header_of(name: str, value: str) -> str:
    return f"named_struct('key', {name}, 'value', binary({value}))"


def _column(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def from_kafka_frame(df: DataFrame) -> DataFrame:
    """The columns of ``format("qkit")`` from what ``spark.read.format("kafka")`` gives.

    Read with ``option("includeHeaders", "true")``: that is where qkit's facts are.
    """
    last = "filter(headers, (h, i) -> not exists(slice(headers, i + 2, 1000), x -> x.key = h.key))"
    told = df.selectExpr("*", f"coalesce(map_from_entries({last}), map()) as told").where(
        "told['qkit-removed'] is null"
    )
    number = "try_cast(string(told['{}']) as long)"
    facts = {
        name: number.format(f"qkit-{name}") for name in ("attempt", "not-before", "expires-at")
    }
    return told.selectExpr(
        "coalesce(string(told['qkit-id']), concat_ws('-', topic, partition, offset)) as id",
        "coalesce(value, binary('')) as value",
        f"transform_values(map_filter(told, (k, v) -> k not in ({_OWN})), (k, v) -> string(v))"
        " as headers",
        "string(key) as key",
        "cast(null as int) as priority",
        f"int(coalesce({facts['attempt']}, 0) + 1) as attempt",
        "if(string(told['qkit-id']) rlike '^[0-9a-f]{12}7[0-9a-f]{19}$', timestamp_millis("
        "bigint(conv(substr(string(told['qkit-id']), 1, 12), 16, 10))), timestamp) as sent_at",
        f"timestamp_millis({facts['not-before']}) as not_before",
        f"timestamp_millis({facts['expires-at']}) as expires_at",
    )


def has_connector(spark: SparkSession) -> bool:
    """Whether Spark's Kafka connector is on the class path."""
    context: Any = spark.sparkContext  # what it has of Java is neither public nor typed
    jvm = context._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    name = _PROVIDER.replace(".", "/") + ".class"
    return loader.getResource(name) is not None


def suits(settings: Settings, options: dict[str, str], columns: list[str]) -> bool:
    """Whether the connector can do all that a write asks for."""
    if settings.type != "kafka" or settings.compression or settings.tls_cert_file:
        return False
    carried = VALUE not in columns or not {"priority", "delay"} & set(columns)
    return carried and options.keys() <= _CONNECTOR


def connector_options(settings: Settings) -> dict[str, str]:
    """The settings as the connector takes them."""
    assert settings.url is not None
    options = {
        "kafka.bootstrap.servers": settings.url.get_secret_value(),
        "kafka.acks": "all",
        "kafka.max.request.size": str(settings.max_message_bytes + _MARGIN),
        "kafka.delivery.timeout.ms": str(max(1_000, int(settings.send_timeout * 1_000)) + 1_000),
        "kafka.request.timeout.ms": str(max(1_000, int(settings.send_timeout * 1_000))),
    }
    sasl, password = settings.sasl_mechanism, settings.sasl_password
    options["kafka.security.protocol"] = {
        (False, False): "PLAINTEXT",
        (True, False): "SSL",
        (False, True): "SASL_PLAINTEXT",
        (True, True): "SASL_SSL",
    }[settings.uses_tls, sasl is not None]
    if settings.tls_ca_file is not None:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = str(settings.tls_ca_file)
    if sasl is not None and password is not None:
        module = "plain.PlainLoginModule" if sasl == "PLAIN" else "scram.ScramLoginModule"
        options["kafka.sasl.mechanism"] = sasl
        options["kafka.sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required "
            f"username={_quoted(settings.sasl_username or '')} "
            f"password={_quoted(password.get_secret_value())};"
        )
    return options


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
