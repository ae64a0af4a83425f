import threading

from kvworker.transfer.gate import Gate


def test_a_closed_gate_lets_nobody_in() -> None:
    gate = Gate()
    assert gate.enter()
    gate.close()
    assert gate.closed
    assert not gate.enter()
    gate.leave()
    gate.wait_empty()


def test_waiting_ends_when_the_last_one_leaves() -> None:
    gate = Gate()
    assert gate.enter()
    assert gate.enter()
    left: list[str] = []
    through = threading.Event()

    def wait() -> None:
        gate.close()
        through.set()
        gate.wait_empty()
        left.append("waiter")

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert through.wait(20)
    left.append("first")
    gate.leave()
    left.append("second")
    gate.leave()
    waiter.join()
    assert left == ["first", "second", "waiter"]
