"""qkit: one way to write message consumers and producers that means the same on every broker.

Decorate typed handlers with ``@channel`` and ``@consume``, send typed messages with
``QueueService.send``, and let a line of configuration decide what carries them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkit.backend import (
        AckMany,
        Admin,
        Backend,
        Capabilities,
        DeadLetterSource,
        Delivery,
        DroppedLetterSource,
        LossReporting,
        QueueSpec,
        QueueStats,
        Subscription,
        SubscriptionSpec,
        Support,
    )
    from qkit.channels import CallNext, Channel, ChannelOptions, Middleware
    from qkit.config import (
        BreakerSettings,
        DeadLetterSettings,
        RetrySettings,
        Settings,
        ShutdownSettings,
    )
    from qkit.dead_letters import DeadLetters
    from qkit.decorators import ConsumeMetadata, QueueMetadata, channel, consume
    from qkit.errors import (
        AckDeadlineExceeded,
        BackendUnavailable,
        BatchError,
        CircuitOpen,
        ConfigError,
        ConsumerNotFound,
        Damage,
        DecodeError,
        HandlerError,
        HandlerTimeout,
        InvalidBody,
        InvalidHeader,
        InvalidName,
        InvalidPriority,
        LifecycleError,
        LogDamaged,
        LogLocked,
        LogVersion,
        MessageNotFound,
        PartialSend,
        PayloadTooLarge,
        QueueError,
        QueueFull,
        QueueNotFound,
        ReadOnly,
        Reject,
        Retry,
        SendTimeout,
        Signal,
        StorageError,
        SubscriptionLost,
        Unavailable,
        Unsupported,
    )
    from qkit.events import DeadLettered, Reconnected, Retried, ShutDown, StateChanged
    from qkit.health import ChannelMetrics, ConnectionState, ConsumerHealth, Health, Metrics
    from qkit.logs import JsonFormatter
    from qkit.message import DeadLetter, Envelope, Message, Reason, Sent
    from qkit.outgoing import SendOptions
    from qkit.registry import Handler
    from qkit.service import QueueService
    from qkit.signatures import Header, ParamMetadata
    from qkit.sync import SyncDeadLetters, SyncQueueService
    from qkit.sync_sender import SyncSender

__version__ = "0.1.0"

__all__ = [
    "AckDeadlineExceeded",
    "AckMany",
    "Admin",
    "Backend",
    "BackendUnavailable",
    "BatchError",
    "BreakerSettings",
    "CallNext",
    "Capabilities",
    "Channel",
    "ChannelMetrics",
    "ChannelOptions",
    "CircuitOpen",
    "ConfigError",
    "ConnectionState",
    "ConsumeMetadata",
    "ConsumerHealth",
    "ConsumerNotFound",
    "Damage",
    "DeadLetter",
    "DeadLetterSettings",
    "DeadLetterSource",
    "DeadLettered",
    "DeadLetters",
    "DecodeError",
    "Delivery",
    "DroppedLetterSource",
    "Envelope",
    "Handler",
    "HandlerError",
    "HandlerTimeout",
    "Header",
    "Health",
    "InvalidBody",
    "InvalidHeader",
    "InvalidName",
    "InvalidPriority",
    "JsonFormatter",
    "LifecycleError",
    "LogDamaged",
    "LogLocked",
    "LogVersion",
    "LossReporting",
    "Message",
    "MessageNotFound",
    "Metrics",
    "Middleware",
    "ParamMetadata",
    "PartialSend",
    "PayloadTooLarge",
    "QueueError",
    "QueueFull",
    "QueueMetadata",
    "QueueNotFound",
    "QueueService",
    "QueueSpec",
    "QueueStats",
    "ReadOnly",
    "Reason",
    "Reconnected",
    "Reject",
    "Retried",
    "Retry",
    "RetrySettings",
    "SendOptions",
    "SendTimeout",
    "Sent",
    "Settings",
    "ShutDown",
    "ShutdownSettings",
    "Signal",
    "StateChanged",
    "StorageError",
    "Subscription",
    "SubscriptionLost",
    "SubscriptionSpec",
    "Support",
    "SyncDeadLetters",
    "SyncQueueService",
    "SyncSender",
    "Unavailable",
    "Unsupported",
    "channel",
    "consume",
]

# Where each name comes from. They are imported when first used, so that ``import qkit`` alone, in a
# program that may not need it, costs next to nothing.
_HOMES = {
    "qkit.backend": (
        "AckMany",
        "Admin",
        "Backend",
        "Capabilities",
        "DeadLetterSource",
        "Delivery",
        "DroppedLetterSource",
        "LossReporting",
        "QueueSpec",
        "QueueStats",
        "Subscription",
        "SubscriptionSpec",
        "Support",
    ),
    "qkit.channels": (
        "CallNext",
        "Channel",
        "ChannelOptions",
        "Middleware",
    ),
    "qkit.config": (
        "BreakerSettings",
        "DeadLetterSettings",
        "RetrySettings",
        "Settings",
        "ShutdownSettings",
    ),
    "qkit.dead_letters": ("DeadLetters",),
    "qkit.errors": (
        "AckDeadlineExceeded",
        "BackendUnavailable",
        "BatchError",
        "CircuitOpen",
        "ConfigError",
        "ConsumerNotFound",
        "Damage",
        "DecodeError",
        "HandlerError",
        "HandlerTimeout",
        "InvalidBody",
        "InvalidHeader",
        "InvalidName",
        "InvalidPriority",
        "LifecycleError",
        "LogDamaged",
        "LogLocked",
        "LogVersion",
        "MessageNotFound",
        "PartialSend",
        "PayloadTooLarge",
        "QueueError",
        "QueueFull",
        "QueueNotFound",
        "ReadOnly",
        "Reject",
        "Retry",
        "SendTimeout",
        "Signal",
        "StorageError",
        "SubscriptionLost",
        "Unavailable",
        "Unsupported",
    ),
    "qkit.events": (
        "DeadLettered",
        "Reconnected",
        "Retried",
        "ShutDown",
        "StateChanged",
    ),
    "qkit.health": (
        "ChannelMetrics",
        "ConnectionState",
        "ConsumerHealth",
        "Health",
        "Metrics",
    ),
    "qkit.logs": ("JsonFormatter",),
    "qkit.message": (
        "DeadLetter",
        "Envelope",
        "Message",
        "Reason",
        "Sent",
    ),
    "qkit.outgoing": ("SendOptions",),
    "qkit.decorators": ("ConsumeMetadata", "QueueMetadata", "channel", "consume"),
    "qkit.registry": ("Handler",),
    "qkit.signatures": ("Header", "ParamMetadata"),
    "qkit.service": ("QueueService",),
    "qkit.sync": (
        "SyncDeadLetters",
        "SyncQueueService",
    ),
    "qkit.sync_sender": ("SyncSender",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'qkit' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
