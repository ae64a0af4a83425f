"""What can befall the processes of a stack, at a moment of a mixed load."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Sequence

from localmaster import LocalMaster
from servers import DaemonProcess
from tests.chaos.victim import Victim, freeze
from tests.e2e.stack import Stack

#: The last exceeds ``lease_ms`` and ``fence_timeout_ms`` here, and Mooncake's client TTL.
FREEZES_S = (0.3, 1.5, 7.0)

#: When a process of the *engine* stood still, if any did.
Frozen = tuple[float, float] | None


class Surroundings:
    """The daemons and the master of a stack; a context manager. All come back."""

    def __init__(
        self, stack: Stack, master: LocalMaster, rng: random.Random, devices: Sequence[str]
    ) -> None:
        self.stack = stack
        self.master = master
        self.rng = rng
        self.devices = tuple(devices)
        self.daemons: dict[str, DaemonProcess] = {}
        #: How often a daemon has ended.
        self.deaths = 0

    def __enter__(self) -> "Surroundings":  # noqa: PYI034 (Self needs Python 3.11)
        with contextlib.ExitStack() as exits:
            exits.callback(self.close)
            for device in self.devices:
                self._start(device)
            exits.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons."""
        for daemon in self.daemons.values():
            daemon.stop()

    def heal(self) -> None:
        """Whatever is down is started again."""
        for device in self.gone:
            self.daemons[device].kill()
            self.deaths += 1
            self._start(device)

    @property
    def gone(self) -> list[str]:
        """Devices whose daemon is not running."""
        return [
            device
            for device, daemon in self.daemons.items()
            if daemon._process is None or daemon._process.poll() is not None
        ]

    def _start(self, device: str) -> None:
        self.daemons[device] = self.stack.daemon(device)
        self.daemons[device].__enter__()

    def one(self) -> DaemonProcess:
        """Any of the daemons."""
        return self.daemons[self.rng.choice(self.devices)]

    def freeze(self, pid: int) -> tuple[float, float]:
        """Stop a process for one of ``FREEZES_S``."""
        return freeze(pid, self.rng.choice(FREEZES_S))


Strike = Callable[[Surroundings, Victim], Frozen]


def _daemon_killed(around: Surroundings, _engine: Victim) -> Frozen:
    around.one().kill()
    time.sleep(around.rng.choice([0.0, 0.5]))
    around.heal()
    if around.rng.random() < 0.5:
        # And again, as soon as it is back: perhaps just as the engine attaches.
        time.sleep(around.rng.uniform(0.0, 0.3))
        around.one().kill()
        around.heal()
    return None


def _daemon_frozen(around: Surroundings, _engine: Victim) -> Frozen:
    around.freeze(around.one().pid)
    around.heal()
    return None


def _daemon_restarted(around: Surroundings, _engine: Victim) -> Frozen:
    around.one().stop()
    around.heal()
    return None


def _master_killed(around: Surroundings, _engine: Victim) -> Frozen:
    around.master.kill()
    time.sleep(around.rng.choice([0.0, 1.0]))
    around.master.start()
    return None


def _master_frozen(around: Surroundings, _engine: Victim) -> Frozen:
    around.freeze(around.master.pid)
    return None


def _master_restarted(around: Surroundings, _engine: Victim) -> Frozen:
    around.master.stop()
    around.master.start()
    return None


def _core_frozen(around: Surroundings, engine: Victim) -> Frozen:
    return around.freeze(engine.core_pid)


def _core_killed(_around: Surroundings, engine: Victim) -> Frozen:
    os.kill(engine.core_pid, signal.SIGKILL)
    return None


def _core_ended(_around: Surroundings, engine: Victim) -> Frozen:
    # What vLLM's server sends its core when it is itself told to end.
    os.kill(engine.core_pid, signal.SIGTERM)
    return None


def _worker_frozen(around: Surroundings, engine: Victim) -> Frozen:
    return around.freeze(around.rng.choice(engine.worker_pids))


def _worker_killed(around: Surroundings, engine: Victim) -> Frozen:
    os.kill(around.rng.choice(engine.worker_pids), signal.SIGKILL)
    return None


def _worker_ended(around: Surroundings, engine: Victim) -> Frozen:
    os.kill(around.rng.choice(engine.worker_pids), signal.SIGTERM)
    return None


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of moment."""

    strike: Strike
    #: Tensor parallel size of the engine it befalls.
    ranks: int = 1
    #: No engine survives it; the next one takes over.
    deadly: bool = False
    #: It befalls the engine: the daemons and the master have no reason to end.
    inside: bool = False


KINDS: dict[str, Fault] = {
    "daemon kill -9": Fault(_daemon_killed),
    "daemon frozen": Fault(_daemon_frozen),
    "daemon restarted": Fault(_daemon_restarted),
    "master kill -9": Fault(_master_killed),
    "master frozen": Fault(_master_frozen),
    "master restarted": Fault(_master_restarted),
    "engine core frozen": Fault(_core_frozen, inside=True),
    "engine core kill -9": Fault(_core_killed, deadly=True, inside=True),
    "engine core restarted": Fault(_core_ended, deadly=True, inside=True),
    "worker frozen": Fault(_worker_frozen, ranks=2, inside=True),
    "worker kill -9": Fault(_worker_killed, ranks=2, deadly=True, inside=True),
    "worker restarted": Fault(_worker_ended, ranks=2, deadly=True, inside=True),
    "one of two daemons kill -9": Fault(_daemon_killed, ranks=2),
    "one of two daemons frozen": Fault(_daemon_frozen, ranks=2),
}
