"""Become a client of a Mooncake master, in a process of its own: a listening port may be anybody's.

The library holds the interpreter lock while it waits for a silent master, and may abort its
process at exit.
"""

import os
import subprocess
import sys

import msgspec

from kvcommon.config import MooncakeConfig
from kvcommon.errors import StoreError

#: The library gives up after two calls of 5 s.
_PATIENCE_S = 30.0
_ANSWER = "kvferry: "


def become_client(config: MooncakeConfig) -> str:
    """Connect without lending memory. Returns why it did not work; empty if it did."""
    lean = msgspec.structs.replace(config, global_segment_size=0)
    command = [sys.executable, "-m", __name__]
    try:
        ended = subprocess.run(
            command,
            input=msgspec.json.encode(lean),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"accepts connections, but does not answer within {_PATIENCE_S:.0f} s"
    for line in ended.stdout.decode(errors="replace").splitlines():
        if line.startswith(_ANSWER):
            return line.removeprefix(_ANSWER)
    return f"a client ended with status {ended.returncode}"


def main() -> None:
    """Connect as standard input says, and print how it went."""
    from kvworker.stores.mooncake_connect import connect, load_library

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=MooncakeConfig)
    answer = ""
    try:
        connect(load_library(), config, 0)
    except StoreError as error:
        answer = str(error)
    sys.stdout.write(f"{_ANSWER}{answer}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
