"""The contract of a backend as a pytest suite.

A backend's author subclasses ``Conformance`` and says how to make a backend::

    class TestMyBackend(Conformance):
        column = MyBackend.capabilities

        @pytest_asyncio.fixture
        async def new_backend(self, clock):
            yield lambda: MyBackend("localhost:1234")

Every scenario that the capabilities call for runs; every feature that is unsupported is proven to
be refused. It needs pytest and pytest-asyncio.
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
from qkit.conformance.lifecycle import Lifecycle
from qkit.conformance.names import Names
from qkit.conformance.outages import Outages
from qkit.conformance.reconnect import Reconnect
from qkit.conformance.refusals import Refusals
from qkit.conformance.send_faults import SendFaults
from qkit.conformance.send_limits import SendLimits
from qkit.conformance.sending import Sending
from qkit.conformance.settlement import Settlement
from qkit.conformance.timing import Timing
from qkit.conformance.topics import Topics

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
    Refusals,
):
    """Every scenario of the contract."""
