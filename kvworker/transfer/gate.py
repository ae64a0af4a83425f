"""Who is touching an engine's memory: the thing that unmapping waits for."""

import threading


class Gate:
    """Counts the operations inside; once closed, nobody enters any more."""

    def __init__(self) -> None:
        """Make an open gate with nobody inside."""
        self._changed = threading.Condition()
        self._inside = 0
        #: Reading it takes no lock; operations look at it between layers to end early.
        self.closed = False

    def enter(self) -> bool:
        """Go in, unless it is closed. Whoever got True calls ``leave`` once."""
        with self._changed:
            if self.closed:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """Go out."""
        with self._changed:
            assert self._inside > 0
            self._inside -= 1
            if self._inside == 0:
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in from now on. Idempotent."""
        with self._changed:
            self.closed = True

    def wait_empty(self) -> None:
        """Return once everybody is out.

        Without a deadline on purpose: memory that a store call still uses cannot be unmapped, and
        only the thread that maps and unmaps waits here.
        """
        with self._changed:
            while self._inside:
                self._changed.wait()
