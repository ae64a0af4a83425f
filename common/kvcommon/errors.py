"""Errors that say whose fault it is and what to do.

Expected failures (a miss, an evicted block, a dead daemon) are result events, not exceptions.
"""


class KVFerryError(Exception):
    """Base of every error that kvferry raises on purpose."""


class ConfigError(KVFerryError):
    """The user's configuration or environment is wrong; the text says what to change.

    Raised at start, before anything is served.
    """


class LocalProtocolError(KVFerryError):
    """We are about to do something illegal: a bug of this process.

    A core that raises it has changed nothing.
    """


class RemoteProtocolError(KVFerryError):
    """The peer sent something illegal. Count it, log it, drop the message."""


class HandleError(KVFerryError):
    """A memory handle cannot be exported or mapped; the text names the cause and the remedy."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        """``cause`` is what happened, ``remedy`` what a person can do about it."""
        super().__init__(f"{cause} ({remedy})" if remedy else cause)
        self.cause = cause
        self.remedy = remedy


class DeviceError(KVFerryError):
    """A device's driver refused an operation; the text has its code and words."""


class StoreError(KVFerryError):
    """A store cannot be opened or used at all (single keys never raise, see ``Outcome``)."""


class StoreUnreachable(StoreError):
    """Nobody answers where the store should be. It may come up later: try again."""


class LogFormatError(KVFerryError):
    """An event log cannot be read: wrong magic, unknown version or a broken header."""
