"""The engine of chaos: ``engine_main`` with one more call, a mixed load that measures its steps."""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import engine_main

GIVE_UP_S = 150.0


class ChaosEngine(engine_main.Engine):
    """An engine that is stepped by hand."""

    def mixed(
        self, prompts: list[list[int]], max_tokens: int, aborted: list[int], prefix: str
    ) -> dict[str, Any]:
        """Serve all prompts at once, abort some on the way; tokens, hung requests, longest step."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        names = [f"{prefix}-{index}" for index in range(len(prompts))]
        for request_id, prompt in zip(names, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {}
        started, worst, steps = time.monotonic(), 0.0, 0
        while engine.has_unfinished_requests() and time.monotonic() - started < GIVE_UP_S:
            before = time.monotonic()
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
            worst = max(worst, time.monotonic() - before)
            steps += 1
            if steps == 3 + len(prompts) and aborted:
                engine.abort_request([names[index] for index in aborted])
        hung = [] if not engine.has_unfinished_requests() else names
        return {
            "tokens": [tokens.get(each) for each in names],
            "hung": len(hung),
            "worst_s": worst,
            "seconds": time.monotonic() - started,
        }


if __name__ == "__main__":
    engine_main.Engine = ChaosEngine  # type: ignore[misc]
    engine_main.main()
