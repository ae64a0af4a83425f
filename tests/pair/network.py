"""A network in memory under the real sockets' users: it drops, delays, repeats and reorders.

``FakeContext`` stands in for ``zmq.Context`` below the real ``DaemonLink``, ``FakeRouter`` for the
daemon's ``Router``. Whatever is sent waits in its wire until ``deliver``.
"""

import struct
from collections import deque
from collections.abc import Iterator

import zmq

from kvworker.router import Incoming

_HIGH_WATER = 64


class Wire:
    """One connected DEALER socket and what travels on it, each way."""

    def __init__(self, network: "Network", endpoint: str, identity: bytes) -> None:
        self.network = network
        self.endpoint = endpoint
        self.identity = identity
        self.is_open = True
        self.to_daemon: deque[bytes] = deque()
        self.to_dealer: deque[bytes] = deque()
        #: Arrived, not yet received.
        self.arrived: deque[bytes] = deque()
        self.changes: deque[int] = deque()

    def __repr__(self) -> str:
        return self.identity.decode()

    def deliver_to_daemon(self, index: int = 0, *, keep: bool = False) -> bool:
        """Bring one frame to the daemon, if it is there; ``keep``: it will come again."""
        router = self.network.routers.get(self.endpoint)
        if router is None or not self.to_daemon:
            return False
        frame = self.to_daemon[index]
        if not keep:
            del self.to_daemon[index]
        router.arrived.append(Incoming(self.identity, frame))
        return True

    def deliver_to_dealer(self, index: int = 0, *, keep: bool = False) -> None:
        """Bring one frame to the other side."""
        self.arrived.append(self.to_dealer[index])
        if not keep:
            del self.to_dealer[index]


class Network:
    """Everything that is in flight."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []
        self.routers: dict[str, FakeRouter] = {}

    def listen(self, endpoint: str) -> "FakeRouter":
        """A daemon binds; whoever waits for it is connected."""
        router = self.routers[endpoint] = FakeRouter(self, endpoint)
        for wire in self._to(endpoint):
            wire.changes.append(zmq.EVENT_CONNECTED)
        return router

    def hang_up(self, endpoint: str) -> None:
        """A daemon is gone. What it had sent is lost; what waits for it goes to the next one."""
        del self.routers[endpoint]
        for wire in self._to(endpoint):
            wire.to_dealer.clear()
            wire.changes.append(zmq.EVENT_DISCONNECTED)

    def _to(self, endpoint: str) -> list[Wire]:
        return [wire for wire in self.wires if wire.endpoint == endpoint]


class FakeRouter:
    """The daemon's end of every wire to its endpoint."""

    def __init__(self, network: Network, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint
        self.arrived: deque[Incoming] = deque()

    def receive(self, limit: int) -> Iterator[Incoming]:
        for _ in range(limit):
            if not self.arrived:
                return
            yield self.arrived.popleft()

    def send(self, identity: bytes, frame: bytes) -> str:
        for wire in self._network.wires:
            if wire.identity == identity and wire.endpoint == self._endpoint:
                if len(wire.to_dealer) >= _HIGH_WATER:
                    return "it does not read its messages"
                wire.to_dealer.append(frame)
                return ""
        return "its connection is gone"


class FakeContext:
    """Makes DEALER sockets."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, _kind: int) -> "FakeDealer":
        return FakeDealer(self._network)


class FakeDealer:
    """As much of a DEALER socket as ``DaemonLink`` uses."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._wire = Wire(network, "", b"")

    def setsockopt(self, option: int, value: bytes) -> None:
        if option == zmq.IDENTITY:
            self._wire.identity = value

    def get_monitor_socket(self, _events: int) -> "FakeMonitor":
        return FakeMonitor(self._wire)

    def disable_monitor(self) -> None:
        self._wire.changes.clear()

    def connect(self, endpoint: str) -> None:
        self._wire.endpoint = endpoint
        self._network.wires.append(self._wire)
        if endpoint in self._network.routers:
            self._wire.changes.append(zmq.EVENT_CONNECTED)

    def getsockopt(self, _option: int) -> int:
        out = zmq.POLLOUT if len(self._wire.to_daemon) < _HIGH_WATER else 0
        return out | (zmq.POLLIN if self._wire.arrived else 0)

    def send(self, frame: bytes, _flags: int = 0) -> None:
        self._wire.to_daemon.append(frame)

    def poll(self, _timeout_ms: int) -> bool:
        return bool(self._wire.arrived)

    def recv(self, _flags: int = 0) -> bytes:
        if not self._wire.arrived:
            raise zmq.Again
        return self._wire.arrived.popleft()

    def close(self, linger: int = 0) -> None:
        self._wire.is_open = False
        if self._wire in self._network.wires:
            self._network.wires.remove(self._wire)


class FakeMonitor:
    """What happened to a socket's connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def setsockopt(self, option: int, value: int) -> None:
        """Nothing to set."""

    def getsockopt(self, _option: int) -> int:
        return zmq.POLLIN if self._wire.changes else 0

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        return [struct.pack("=hi", self._wire.changes.popleft(), 0), b""]

    def close(self, linger: int = 0) -> None:
        """Nothing to close."""
