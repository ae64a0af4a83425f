"""What Mooncake's numbers mean: a pure table from result code to ``Outcome``; and how to quote.

The numbers are those of ``ErrorCode`` in Mooncake's ``types.h``, seen with 0.3.13. An unknown
negative number is FAILED. Not negative is success, but of what depends on the call: ``moved`` wants
a number of bytes, ``found`` wants exactly 1.
"""

from kvworker.outcome import Outcome

#: Not a code of Mooncake's: our own answer for a call that gave no proper list.
NO_ANSWER = -1
INVALID_PARAMS = -600
LEASE_EXPIRED = -707
RPC_FAIL = -900
RPC_TIMEOUT = -901

_OUTCOMES: dict[int, Outcome] = {
    -101: Outcome.MISS,  # segment not found: its owner is gone
    -200: Outcome.FULL,  # no available handle
    -703: Outcome.MISS,  # replica is not ready: somebody is still writing it
    -704: Outcome.MISS,  # object not found
    -705: Outcome.EXISTS,  # object already exists, or is being written by somebody
    LEASE_EXPIRED: Outcome.EXPIRED,
    -710: Outcome.MISS,  # replica not found
    -712: Outcome.MISS,  # replica is gone
    RPC_FAIL: Outcome.DOWN,
    RPC_TIMEOUT: Outcome.DOWN,
    -1010: Outcome.DOWN,  # unavailable in the current status
    -1011: Outcome.DOWN,  # unavailable in the current mode
    -1700: Outcome.FULL,  # tenant quota exceeded
}

#: Codes that mean a bug of ours or a misuse: worth a loud line in the log.
BUGS = frozenset({-400, INVALID_PARAMS, -601})


def done(code: int) -> Outcome:
    """Outcome of a call that answers 0 for success (session start, end, revoke; put)."""
    return Outcome.OK if code == 0 else failure(code)


def moved(code: int, expected: int) -> Outcome:
    """Outcome of a transfer that answers the bytes moved. Any other number is FAILED."""
    return Outcome.OK if code == expected and code >= 0 else failure(code)


def found(code: int) -> Outcome:
    """Outcome of an existence check: 1 is there, 0 is not, negative is an error."""
    if code == 1:
        return Outcome.OK
    return Outcome.MISS if code == 0 else failure(code)


def failure(code: int) -> Outcome:
    """Outcome of a code that is not success."""
    return _OUTCOMES.get(code, Outcome.FAILED)


def quote(prefix: str) -> str:
    """Quote a prefix for the master's regular expressions (ECMAScript)."""
    return "".join("\\" + mark if mark in "^$\\.*+?()[]{}|/" else mark for mark in prefix)
