"""One core's parts belong together, and two cores share nothing."""

from kvworker.core.config import CoreConfig
from kvworker.core.parts import make_parts


def test_two_cores_share_nothing() -> None:
    config = CoreConfig(device="cpu:0", store="memory")
    one, other = make_parts(config), make_parts(config)
    for name in vars(one):
        assert getattr(one, name) is not getattr(other, name)


def test_parts_of_one_core_use_the_same_kernel() -> None:
    parts = make_parts(CoreConfig(device="cpu:0", store="memory"))
    users = (parts.breaker, parts.saves, parts.loads, parts.lookups, parts.schedulers, parts.plans)
    assert all(vars(part)["_kernel"] is parts.kernel for part in users)
