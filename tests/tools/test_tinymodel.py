"""The tiny model is the same every time, and its KV cache matters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import tinymodel

#: Runs one engine in one process and prints the logprobs of the continuation of a prompt, again,
#: again behind a cached prefix, and with 64 of its 700 tokens changed far from the end.
PROBE = """
import json, random, sys
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_model_len=1024, enforce_eager=True, seed=0)
prompt = random.Random(1).choices(range(10, 700), k=700)
other = list(prompt)
other[200:264] = random.Random(2).choices(range(10, 700), k=64)
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
found = []
for tokens, reset in ((prompt, True), (prompt, True), (prompt, False), (other, True)):
    if reset:
        llm.reset_prefix_cache()
    [output] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    steps = output.outputs[0].logprobs
    found.append([[[token, mark.logprob] for token, mark in step.items()] for step in steps])
print("FOUND" + json.dumps(found))
"""


def probe(model: Path) -> list[list[tuple[int, float]]]:
    """Run ``PROBE`` on a model: four runs of 8 (token, logprob)."""
    environ = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(model)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.rpartition("FOUND")[2])
    return [[tuple(step[0]) for step in run] for run in runs]


def test_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    spec = tinymodel.ModelSpec(layers=2)
    first = tinymodel.model_digest(tinymodel.make_model(tmp_path / "a", spec))
    # Another process, so that nothing a process draws at random can play a part.
    command = [sys.executable, tinymodel.__file__, str(tmp_path / "b"), "--layers", "2"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert tinymodel.model_digest(tmp_path / "b") == first
    other = tinymodel.make_model(tmp_path / "c", tinymodel.ModelSpec(layers=2, seed=1))
    assert tinymodel.model_digest(other) != first


def test_a_finished_folder_is_left_alone(tmp_path: Path) -> None:
    spec = tinymodel.ModelSpec(layers=1)
    tinymodel.make_model(tmp_path, spec)
    weights = tmp_path / "model.safetensors"
    before = weights.stat()
    tinymodel.make_model(tmp_path, spec)
    assert weights.stat().st_mtime_ns == before.st_mtime_ns
    tinymodel.make_model(tmp_path, tinymodel.ModelSpec(layers=2))
    assert weights.stat().st_size > before.st_size


def test_an_unfinished_folder_is_made_again(tmp_path: Path) -> None:
    spec = tinymodel.ModelSpec(layers=1)
    whole = tinymodel.model_digest(tinymodel.make_model(tmp_path, spec))
    (tmp_path / "tinymodel.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert tinymodel.model_digest(tinymodel.make_model(tmp_path, spec)) == whole


def test_kv_bytes_per_token() -> None:
    assert tinymodel.ModelSpec().kv_bytes_per_token() == 16 * 1024
    half = tinymodel.ModelSpec(dtype="bfloat16", layers=2, kv_heads=2)
    assert half.kv_bytes_per_token() == 1024


def test_the_kv_cache_matters(tmp_path: Path) -> None:
    same, again, cached, changed = probe(tinymodel.make_model(tmp_path))
    tokens = [token for token, _ in same]
    for other in (again, cached):
        assert [token for token, _ in other] == tokens
        assert max(abs(a[1] - b[1]) for a, b in zip(same, other, strict=True)) < 1e-4
    # The negative control: with another prefix the continuation is another.
    assert [token for token, _ in changed] != tokens
    assert abs(same[0][1] - changed[0][1]) > 0.01
