"""qkit's Kafka message format for Spark's own connector, written and parsed by Spark SQL.

No row passes through Python. Features that the connector lacks (validation, delays, qkit's
compression) require ``format("qkit")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qkit._internal.names import check_name
from qkit.errors import Unsupported
from qkit.settings.model import Settings
from qkit.spark.columns import VALUE, Columns, columns_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "connector_options",
    "connector_supports",
    "from_kafka_frame",
    "has_connector",
    "kafka_frame",
]

_RESERVED_HEADERS: Final = (
    "'qkit-id', 'qkit-attempt', 'qkit-not-before', 'qkit-expires-at', 'qkit-removed', "
    "'qkit-original-topic', 'qkit-original-partition', 'qkit-original-offset'"
)
_CONNECTOR_CLASS: Final = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_REQUEST_OVERHEAD_BYTES: Final = 128 << 10  # for headers and framing
_SUPPORTED_OPTIONS: Final = frozenset({"key", "ttl", "headers", "channel", "broadcast"})


def kafka_frame(
    df: DataFrame, channel: str, *, settings: Settings | None = None, **columns: str
) -> DataFrame:
    """Return the columns that ``df.write.format("kafka")`` needs, in qkit's format.

    Any qkit consumer can read the messages.

    Args:
        df: The rows, with the column rules of ``format("qkit")``: all columns together form the
            JSON body, unless there is a column ``value``.
        channel: The queue or topic to send to.
        settings: Settings whose ``prefix`` is part of the topic name. Default: no prefix.
        columns: Columns that hold the ``key``, ``ttl`` (in seconds) and ``headers``, for example
            ``key="customer"``.

    Returns:
        A DataFrame with the columns ``topic``, ``key``, ``value`` and ``headers``.

    Raises:
        Unsupported: A column is a priority or a delay, which the connector cannot send.
        ConfigError: A column is missing, unexpected or of the wrong type.

    Example:
        >>> df = spark.sql("select 1 as id, 'c1' as customer")  # doctest: +SKIP
        >>> frame = qkit.spark.kafka_frame(df, "orders", key="customer")  # doctest: +SKIP
        >>> frame.columns  # doctest: +SKIP
        ['topic', 'key', 'value', 'headers']
    """
    found = columns_of(df.schema, columns)
    chosen = dict(found.metadata)
    for name in ("priority", "delay"):
        if name in chosen:
            raise Unsupported(
                f"the column {chosen[name]!r} is the {name} of the message, which Spark's Kafka "
                "connector cannot send: drop it, or write with format('qkit')",
                backend="kafka",
                operation="send",
                queue=channel,
            )
    body = {
        "row": "to_json(struct(*), map('ignoreNullFields', 'false'))",
        "struct": f"to_json({VALUE}, map('ignoreNullFields', 'false'))",
    }.get(found.kind, VALUE)
    topic = check_name(channel) if settings is None else settings.broker_name(check_name(channel))
    key = f"binary({_column(chosen['key'])})" if "key" in chosen else "cast(null as binary)"
    return df.selectExpr(
        f"'{topic}' as topic",
        f"{key} as key",
        f"binary({body}) as value",
        f"{_headers(found)} as headers",
    )


def _headers(columns: Columns) -> str:
    chosen = dict(columns.metadata)
    headers = [_header("qkit-id", _ID)]
    if columns.kind == "bytes":
        headers.append(_header("content-type", "'application/octet-stream'"))
    optional = [f"array({', '.join(headers)})"]
    if "ttl" in chosen:
        at = f"unix_millis(current_timestamp()) + ceil({_column(chosen['ttl'])} * 1000)"
        present = f"array({_header('qkit-expires-at', f'string({at})')})"
        optional.append(f"if({_column(chosen['ttl'])} is null, {_NO_HEADERS}, {present})")
    if "headers" in chosen:
        entries = f"map_entries({_column(chosen['headers'])})"
        optional.append(
            f"coalesce(transform({entries}, e -> {_header_of('e.key', 'e.value')}), {_NO_HEADERS})"
        )
    return f"concat({', '.join(optional)})"


# UUIDv7 without dashes, as in ``new_id``. Spark's uuid() returns the same value in a retried task.
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
    """Convert rows of ``spark.read.format("kafka")`` to the columns of ``format("qkit")``.

    Args:
        df: Rows that were read with ``option("includeHeaders", "true")``, because qkit stores the
            id, attempt and times of a message in its headers.

    Returns:
        A DataFrame with the columns ``id``, ``value``, ``headers``, ``key``, ``priority`` (always
        null), ``attempt``, ``sent_at``, ``not_before`` and ``expires_at``.

    Example:
        >>> sent = qkit.spark.kafka_frame(spark.range(1), "orders")  # doctest: +SKIP
        >>> columns = ["*", "0 as partition", "0L as offset", "now() as timestamp"]
        >>> kafka = sent.selectExpr(*columns)  # doctest: +SKIP
        >>> qkit.spark.from_kafka_frame(kafka).first()["value"]  # doctest: +SKIP
        b'{"id":0}'
    """
    last = "filter(headers, (h, i) -> not exists(slice(headers, i + 2, 1000), x -> x.key = h.key))"
    frame = df.selectExpr("*", f"coalesce(map_from_entries({last}), map()) as by_name").where(
        "by_name['qkit-removed'] is null"
    )
    number = "try_cast(string(by_name['{}']) as long)"
    numbers = {
        name: number.format(f"qkit-{name}") for name in ("attempt", "not-before", "expires-at")
    }
    user_headers = f"map_filter(by_name, (k, v) -> k not in ({_RESERVED_HEADERS}))"
    return frame.selectExpr(
        "coalesce(string(by_name['qkit-id']), concat_ws('-', topic, partition, offset)) as id",
        "coalesce(value, binary('')) as value",
        f"transform_values({user_headers}, (k, v) -> string(v)) as headers",
        "string(key) as key",
        "cast(null as int) as priority",
        f"int(coalesce({numbers['attempt']}, 0) + 1) as attempt",
        "if(string(by_name['qkit-id']) rlike '^[0-9a-f]{12}7[0-9a-f]{19}$', timestamp_millis("
        "bigint(conv(substr(string(by_name['qkit-id']), 1, 12), 16, 10))), timestamp) as sent_at",
        f"timestamp_millis({numbers['not-before']}) as not_before",
        f"timestamp_millis({numbers['expires-at']}) as expires_at",
    )


def has_connector(spark: SparkSession) -> bool:
    """Return whether Spark's Kafka connector is on the class path."""
    context: Any = spark.sparkContext  # its Java attributes are neither public nor typed
    jvm = context._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    name = _CONNECTOR_CLASS.replace(".", "/") + ".class"
    return loader.getResource(name) is not None


def connector_supports(settings: Settings, options: dict[str, str], columns: list[str]) -> bool:
    """Return whether the connector supports the settings, options and columns of a write."""
    if settings.type != "kafka" or settings.compression or settings.tls_cert_file:
        return False
    supported = VALUE not in columns or not {"priority", "delay"} & set(columns)
    return supported and options.keys() <= _SUPPORTED_OPTIONS


def connector_options(settings: Settings) -> dict[str, str]:
    """Return the settings as options of the connector."""
    assert settings.url is not None
    options = {
        "kafka.bootstrap.servers": settings.url.get_secret_value(),
        "kafka.acks": "all",
        "kafka.max.request.size": str(settings.max_message_bytes + _REQUEST_OVERHEAD_BYTES),
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
