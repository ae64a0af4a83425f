"""Asking a daemon how it is, from another process."""

import os

import zmq

from kvcommon.channel import Channel
from kvcommon.endpoints import check_endpoint
from kvcommon.errors import ConfigError, RemoteProtocolError
from kvcommon.ids import new_epoch
from kvcommon.messages import PROTOCOL_VERSION, Status, StatusRequest, decode_from_daemon
from kvcommon.messages.codec import decode_envelope


def ask_status(endpoint: str, timeout_s: float) -> Status:
    """Ask the daemon behind an endpoint.

    Raises:
        ConfigError: nobody answers in time, or the answer is of another protocol version.
    """
    path = check_endpoint(endpoint).removeprefix("ipc://")
    if path != endpoint and not os.path.exists(path):  # noqa: PTH110 (a socket name, not a file)
        raise ConfigError(f"no daemon serves {endpoint}: start one with kvworker serve")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 16)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{endpoint} is not an endpoint: {error}") from None
        socket.send(Channel("", 0, "status", new_epoch()).stamp(StatusRequest()))
        if not socket.poll(int(timeout_s * 1000)):
            raise ConfigError(
                f"the daemon at {endpoint} does not answer within {timeout_s:g} s: it is stopped, "
                "frozen or gone"
            )
        frame = socket.recv()
    try:
        envelope = decode_envelope(frame)
        if envelope.version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the daemon at {endpoint} speaks protocol version {envelope.version}, this "
                f"command {PROTOCOL_VERSION}: use the command of the daemon's release"
            )
        body = decode_from_daemon(envelope)
    except RemoteProtocolError as error:
        raise ConfigError(f"{endpoint} is not a kvferry daemon: {error}") from None
    if not isinstance(body, Status):
        raise ConfigError(f"the daemon at {endpoint} answered {type(body).__name__}, not Status")
    return body
