"""What ``run`` cannot do."""


class DriveError(Exception):
    """The recording cannot be played; the message says why and what to change."""
