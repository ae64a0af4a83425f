"""The parts of one core, made and joined in one place."""

from dataclasses import dataclass

from kvworker.core.attachments import Attachments
from kvworker.core.breaker import Breaker
from kvworker.core.config import CoreConfig
from kvworker.core.engines import Engines
from kvworker.core.jobs import JobBook
from kvworker.core.kernel import Kernel
from kvworker.core.loads import Loads
from kvworker.core.lookups import Lookups
from kvworker.core.plans import Plans
from kvworker.core.saves import Saves
from kvworker.core.schedulers import Schedulers


@dataclass(frozen=True)
class Parts:
    """See each part's module."""

    kernel: Kernel
    engines: Engines
    book: JobBook
    breaker: Breaker
    saves: Saves
    loads: Loads
    lookups: Lookups
    schedulers: Schedulers
    plans: Plans
    attachments: Attachments


def make_parts(config: CoreConfig) -> Parts:
    """Make the parts of a fresh core."""
    kernel = Kernel(config)
    engines = Engines(config)
    book = JobBook(kernel)
    breaker = Breaker(kernel, engines)
    saves = Saves(kernel, book, breaker)
    loads = Loads(kernel, book, breaker)
    return Parts(
        kernel=kernel,
        engines=engines,
        book=book,
        breaker=breaker,
        saves=saves,
        loads=loads,
        lookups=Lookups(kernel, breaker),
        schedulers=Schedulers(kernel, book, breaker, saves, loads),
        plans=Plans(kernel, book, saves, loads),
        attachments=Attachments(kernel, saves, loads),
    )
