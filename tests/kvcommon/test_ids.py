from kvcommon.ids import EngineId, engine_key, new_epoch


def test_engine_key_names_one_rank() -> None:
    assert engine_key(EngineId("e_dp1"), 3) == "e_dp1#3"


def test_epochs_are_fresh_and_fit_63_bits() -> None:
    epochs = {new_epoch() for _ in range(100)}
    assert len(epochs) == 100
    assert all(0 < epoch < 1 << 63 for epoch in epochs)
