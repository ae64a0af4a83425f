"""The engine of scenes that choose their step: ``engine_main`` with requests stepped by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e import engine_main


class SteppedEngine(engine_main.Engine):
    """An engine that takes requests in, and steps, when it is told."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
        """Take a request in."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> bool:
        """One step; whether a request is left."""
        self.llm.llm_engine.step()
        return bool(self.llm.llm_engine.has_unfinished_requests())

    def finish(self) -> None:
        """Step until no request is left."""
        while self.step():
            pass

    def abort(self, request_id: str) -> None:
        """Give a request up."""
        self.llm.llm_engine.abort_request([request_id])


if __name__ == "__main__":
    engine_main.Engine = SteppedEngine  # type: ignore[misc]
    engine_main.main()
