"""qkit: one way to write message consumers and producers that means the same on every broker.

Decorate typed handlers with ``@channel`` and ``@consume``, send typed messages with
``QueueService.send``, and let a line of configuration decide what carries them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkit._internal.logging import JsonFormatter
    from qkit.admin.dead_letters import DeadLetters
    from qkit.backend import (
        AckMany,
        Admin,
        Backend,
        Capabilities,
        DeadLetterSource,
        Delivery,
        DroppedLetterSource,
        ExtendMany,
        LossReporting,
        PublishGroups,
        QueueSpec,
        QueueStats,
        Subscription,
        SubscriptionSpec,
        Support,
    )
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
    from qkit.handlers.channel import CallNext, Channel, ChannelOptions, Middleware
    from qkit.handlers.decorators import ConsumeMetadata, QueueMetadata, channel, consume
    from qkit.handlers.registry import Handler
    from qkit.handlers.signature import Header, ParamMetadata
    from qkit.message import DeadLetter, Envelope, Message, Reason, Sent
    from qkit.observability.connection_state import ConnectionState
    from qkit.observability.events import DeadLettered, Reconnected, Retried, ShutDown, StateChanged
    from qkit.observability.health import ConsumerHealth, Health
    from qkit.observability.metrics import ChannelMetrics, Metrics
    from qkit.sending.envelope_builder import SendOptions
    from qkit.sending.sync_sender import SyncSender
    from qkit.service import QueueService
    from qkit.settings.model import (
        BreakerSettings,
        DeadLetterSettings,
        RetrySettings,
        Settings,
        ShutdownSettings,
    )
    from qkit.sync import SyncDeadLetters, SyncQueueService

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
    "ExtendMany",
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
    "PublishGroups",
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
        "ExtendMany",
        "LossReporting",
        "PublishGroups",
        "QueueSpec",
        "QueueStats",
        "Subscription",
        "SubscriptionSpec",
        "Support",
    ),
    "qkit.handlers.channel": (
        "CallNext",
        "Channel",
        "ChannelOptions",
        "Middleware",
    ),
    "qkit.settings.model": (
        "BreakerSettings",
        "DeadLetterSettings",
        "RetrySettings",
        "Settings",
        "ShutdownSettings",
    ),
    "qkit.admin.dead_letters": ("DeadLetters",),
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
    "qkit.observability.events": (
        "DeadLettered",
        "Reconnected",
        "Retried",
        "ShutDown",
        "StateChanged",
    ),
    "qkit.observability.connection_state": ("ConnectionState",),
    "qkit.observability.health": ("ConsumerHealth", "Health"),
    "qkit.observability.metrics": ("ChannelMetrics", "Metrics"),
    "qkit._internal.logging": ("JsonFormatter",),
    "qkit.message": (
        "DeadLetter",
        "Envelope",
        "Message",
        "Reason",
        "Sent",
    ),
    "qkit.sending.envelope_builder": ("SendOptions",),
    "qkit.handlers.decorators": ("ConsumeMetadata", "QueueMetadata", "channel", "consume"),
    "qkit.handlers.registry": ("Handler",),
    "qkit.handlers.signature": ("Header", "ParamMetadata"),
    "qkit.service": ("QueueService",),
    "qkit.sync": (
        "SyncDeadLetters",
        "SyncQueueService",
    ),
    "qkit.sending.sync_sender": ("SyncSender",),
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
