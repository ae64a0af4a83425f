"""Any legal order of events, against a small model of the world (see ``support/worker_world``)."""

from hypothesis import HealthCheck, settings

from tests.support.worker_machine import CoreMachine

CoreMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoreMachine = CoreMachine.TestCase
