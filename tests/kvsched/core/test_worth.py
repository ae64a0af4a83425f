from kvsched.core.worth import Worth


def measured(bandwidth: int, tokens_per_s: int) -> Worth:
    worth = Worth(num_bytes_per_block=1000)
    worth.load_measured(bandwidth, 1_000_000)
    worth.step_measured(tokens_per_s, 1_000_000_000)
    return worth


def test_what_is_not_known_is_loaded() -> None:
    assert Worth(0).judge(1, 16)
    worth = Worth(1000)
    assert worth.judge(1, 16)
    worth.load_measured(1, 1_000_000)
    assert worth.judge(1, 16)


def test_the_faster_way_is_taken() -> None:
    # 1 block of 1000 bytes: 10 ms at 100 kB/s. 16 tokens: 16 ms at 1000 tokens/s.
    assert measured(100_000, 1000).judge(1, 16)
    assert not measured(50_000, 1000).judge(1, 16)
    assert not measured(100_000, 2000).judge(1, 16)


def test_after_many_refusals_one_load_is_let_through_to_measure_again() -> None:
    worth = measured(50_000, 1000)
    assert [worth.judge(1, 16) for _ in range(34)] == ([False] * 16 + [True]) * 2


def test_small_steps_and_empty_loads_are_not_measured() -> None:
    worth = Worth(1000)
    worth.step_measured(63, 1_000_000_000)
    worth.step_measured(64, 0)
    worth.load_measured(0, 100)
    worth.load_measured(100, 0)
    assert (worth.seconds_per_token, worth.bandwidth) == (0, 0)


def test_measurements_are_smoothed() -> None:
    worth = Worth(1000)
    worth.load_measured(100, 1_000_000)
    worth.load_measured(200, 1_000_000)
    assert worth.bandwidth == 120
