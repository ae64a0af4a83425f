"""Keeps the KV cache out of expandable segments, which cannot be shared with another process.

vllm-ascend switches them on by default. The connector is made before the KV cache is allocated and
is handed it right after, so for that while, and only then, torch's allocator is told to do without.
"""

import logging
import os
import sys
from collections.abc import Mapping

logger = logging.getLogger("vllm.kvferry.memory")

#: By the module that shows which device this process uses: what its allocator reads, and where its
#: settings can be changed while it runs (torch_npu: since 7.3.0).
_ALLOCATORS = {
    "torch_npu": (("PYTORCH_NPU_ALLOC_CONF",), "npu"),
    "torch": (("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "cuda"),
}
_OFF, _ON = "expandable_segments:False", "expandable_segments:True"


def expandable(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Tell whether the environment switches expandable segments on."""
    settings = ",".join(environ.get(name, "") for name in names).replace(" ", "").lower()
    return "expandable_segments:true" in settings.split(",")


class PlainAllocation:
    """While it is open, device memory is allocated so that it can be shared."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Switch expandable segments off, if this process uses them and can."""
        self._change = None
        for module, (names, attribute) in _ALLOCATORS.items():
            if module not in sys.modules or not expandable(environ, names):
                continue
            memory = getattr(getattr(sys.modules["torch"], attribute), "memory", None)
            self._change = getattr(memory, "_set_allocator_settings", None)
            if self._change is None:
                logger.warning(
                    "kvferry: this %s cannot switch expandable segments off for the KV cache: "
                    "start vLLM with %s=%s",
                    module,
                    names[0],
                    _OFF,
                )
                return
            self._change(_OFF)
            return

    @property
    def switched(self) -> bool:
        """Something was switched off that ``close`` switches on again."""
        return self._change is not None

    def close(self) -> None:
        """Let the allocator do as it was told before. Idempotent."""
        change, self._change = self._change, None
        if change is not None:
            change(_ON)
