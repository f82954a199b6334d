"""Backend conformance suite: the contract of a backend as pytest scenarios.

Subclass ``Conformance`` and override the fixture that creates your backend::

    class TestMyBackend(Conformance):
        column = MyBackend.capabilities

        @pytest_asyncio.fixture
        async def new_backend(self, clock):
            yield lambda: MyBackend("localhost:1234")

The suite runs every scenario whose features the backend declares. For each feature that the backend
does not support, it checks that using the feature raises an error. It needs pytest and
pytest-asyncio.
"""

from qkit.backends.capability_matrix import COLUMNS, MATRIX
from qkit.conformance.admin import Admin
from qkit.conformance.dead_letters import DeadLetterRecords
from qkit.conformance.declarations import Declarations
from qkit.conformance.delivery import Deliveries
from qkit.conformance.failure import Failure
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.foreign import Foreign
from qkit.conformance.handlers import Handlers
from qkit.conformance.harness import Harness, NewBackend, requires
from qkit.conformance.headers import Headers
from qkit.conformance.health import HealthAndMetrics
from qkit.conformance.key_order import KeyOrder
from qkit.conformance.lifecycle import Lifecycle
from qkit.conformance.names import Names
from qkit.conformance.outages import Outages
from qkit.conformance.reconnect import Reconnect
from qkit.conformance.send_faults import SendFaults
from qkit.conformance.send_limits import SendLimits
from qkit.conformance.sending import Sending
from qkit.conformance.settlement import Settlement
from qkit.conformance.timing import Timing
from qkit.conformance.topics import Topics
from qkit.conformance.unsupported import UnsupportedFeatures

__all__ = [
    "COLUMNS",
    "MATRIX",
    "Conformance",
    "FaultInjectingBackend",
    "Harness",
    "NewBackend",
    "requires",
]


class Conformance(
    Sending,
    SendLimits,
    SendFaults,
    Declarations,
    Deliveries,
    Timing,
    KeyOrder,
    Handlers,
    Settlement,
    Failure,
    Outages,
    DeadLetterRecords,
    Topics,
    Lifecycle,
    Reconnect,
    HealthAndMetrics,
    Admin,
    Headers,
    Foreign,
    Names,
    UnsupportedFeatures,
):
    """All scenarios of the contract; subclass it to test a backend.

    Attributes:
        column: The capabilities that the backend must declare: ``MATRIX[...]`` for a built-in
            backend, otherwise the backend's own ``Capabilities``.
        virtual_time: Whether the scenarios run in virtual time. Set it only for a backend that
            does all its work in this process. Default: false.
        settings: Settings for the services that the scenarios start. Default: none.

    Example:
        >>> import pytest_asyncio
        >>> from qkit.backends.native.backend import NativeBackend
        >>> from qkit.conformance import MATRIX, Conformance
        >>> from qkit.native import Engine
        >>> class TestNative(Conformance):
        ...     column = MATRIX["native-memory"]
        ...     virtual_time = True
        ...     @pytest_asyncio.fixture
        ...     async def new_backend(self, clock):
        ...         async with Engine(clock=clock) as engine:
        ...             yield lambda: NativeBackend(engine=engine)
    """
