import sys
import types

import pytest

from kvcommon.memory.allocator import PlainAllocation, expandable

NAMES = ("PYTORCH_NPU_ALLOC_CONF",)
ON = {"PYTORCH_NPU_ALLOC_CONF": "page_size:1g, expandable_segments:True"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("page_size:1g,Expandable_Segments: true", True),
        ("expandable_segments:False", False),
        ("max_split_size_mb:32", False),
    ],
)
def test_the_environment_says_whether_segments_expand(text: str, wanted: bool) -> None:
    assert expandable({"PYTORCH_NPU_ALLOC_CONF": text}, NAMES) is wanted


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch with torch_npu, whose allocator writes down what it is told."""
    found: list[str] = []
    torch = types.ModuleType("torch")
    memory = types.SimpleNamespace(_set_allocator_settings=found.append)
    torch.npu = types.SimpleNamespace(memory=memory)  # type: ignore[attr-defined]
    torch.cuda = types.SimpleNamespace(memory=memory)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    return found


def test_they_are_off_while_the_cache_is_allocated_and_on_again_after(changes: list[str]) -> None:
    allocation = PlainAllocation(ON)
    assert allocation.switched
    assert changes == ["expandable_segments:False"]
    allocation.close()
    allocation.close()
    assert changes == ["expandable_segments:False", "expandable_segments:True"]


def test_what_is_off_anyway_is_not_touched(changes: list[str]) -> None:
    allocation = PlainAllocation({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False"})
    allocation.close()
    assert not changes


def test_an_allocator_that_cannot_is_complained_about(
    changes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    sys.modules["torch"].npu = types.SimpleNamespace(memory=types.SimpleNamespace())  # type: ignore[attr-defined]
    allocation = PlainAllocation(ON)
    assert not allocation.switched
    assert "PYTORCH_NPU_ALLOC_CONF=expandable_segments:False" in caplog.text
    allocation.close()


def test_a_process_without_a_device_is_left_alone(
    changes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu")
    PlainAllocation(ON).close()
    assert not changes
