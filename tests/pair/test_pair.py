"""Both cores over a network that drops, delays, repeats and reorders: rules 1, 2, 3 and 8 hold."""

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.pair.machine import PairMachine

PairMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # A story that fails is read as it is: making it short takes longer than anybody waits.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestPair = pytest.mark.timeout(300)(PairMachine.TestCase)
