import logging

import pytest

from kvworker.stores.complaints import QUIET_S, Complaints


def test_a_kind_is_logged_once_in_a_while_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [100.0]
    complaints = Complaints(logging.getLogger("test.complaints"), now_s=lambda: now[0])
    for _ in range(3):
        complaints.say("put", "put failed")
    complaints.say("get", "get failed", logging.ERROR)
    now[0] += QUIET_S
    complaints.say("put", "put failed")
    now[0] += QUIET_S
    complaints.say("put", "put failed")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "put failed"),
        ("ERROR", "get failed"),
        ("WARNING", "put failed (2 more like this before)"),
        ("WARNING", "put failed"),
    ]
