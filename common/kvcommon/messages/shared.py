"""Messages that both directions use."""

from kvcommon.messages.base import Message


class Heartbeat(Message, frozen=True, kw_only=True, omit_defaults=True):
    """"I am alive, and this is what I have received": the envelope says the rest."""
