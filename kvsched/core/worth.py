"""The policy behind ``load: auto``: load only what arrives before it could be computed.

Both speeds are measured while serving and smoothed. What has not been measured yet counts as
"load", and so does every ``_EXPLORE``-th refusal, so that a speed that was bad once is measured
again.
"""

#: Weight of the newest measurement.
_WEIGHT = 0.2
#: Steps with fewer tokens say little about the speed of prefill.
MIN_STEP_TOKENS = 64
#: After so many refusals in a row one load is let through.
_EXPLORE = 16


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _WEIGHT * (new - old)


class Worth:
    """Measured speeds, and the judgement made of them."""

    def __init__(self, num_bytes_per_block: int) -> None:
        self._num_bytes_per_block = num_bytes_per_block
        #: Bytes per second of loads; 0: not measured.
        self.bandwidth = 0.0
        #: Seconds per token of prefill; 0: not measured.
        self.seconds_per_token = 0.0
        self._refusals = 0

    def load_measured(self, num_bytes: int, duration_us: int) -> None:
        """One rank ended a load."""
        if num_bytes > 0 and duration_us > 0:
            self.bandwidth = _smooth(self.bandwidth, num_bytes * 1e6 / duration_us)

    def step_measured(self, num_tokens: int, duration_ns: int) -> None:
        """A step without loads was computed."""
        if num_tokens >= MIN_STEP_TOKENS and duration_ns > 0:
            rate = duration_ns / 1e9 / num_tokens
            self.seconds_per_token = _smooth(self.seconds_per_token, rate)

    def judge(self, num_blocks: int, num_tokens: int) -> bool:
        """Say whether loading ``num_blocks`` beats computing ``num_tokens``. Counts refusals."""
        if self._num_bytes_per_block == 0 or self.bandwidth == 0 or self.seconds_per_token == 0:
            return True
        load_s = num_blocks * self._num_bytes_per_block / self.bandwidth
        if load_s < num_tokens * self.seconds_per_token:
            self._refusals = 0
            return True
        self._refusals += 1
        if self._refusals > _EXPLORE:
            self._refusals = 0
            return True
        return False
