"""Make a tiny random Llama on disk: configuration, weights, tokenizer and chat template.

The weights are seeded and *large*: vLLM's own dummy weights are so small that the logits hardly
depend on the KV cache, and any comparison of tokens passes. Here a changed prefix changes the
logprobs of what follows by far more than any tolerance. The same specification gives the same
bytes, and a second call with it returns at once.

Load it with ``dtype="float32"``: vLLM's ``auto`` makes bfloat16 of a float32 model, and logprobs
then differ by 0.03 between a prompt computed at once and one computed behind a cached prefix.

Nothing is downloaded. The tokenizer is a byte-level BPE trained on the text of this file.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: Changes whenever the same specification would give other bytes.
RECIPE = 2
#: Standard deviations at which the KV cache matters in a model 256 wide.
EMBEDDING_STD = 1.0
PROJECTION_STD = 0.12
MLP_STD = 0.06

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

#: What the tokenizer learns its merges from.
TRAINING_TEXT = """
A ferry carries people and goods across the water. It leaves one harbour when it is full, and the
other side knows what is coming before it arrives. The captain keeps a log: what was loaded, when,
and by whom. When something is missing, the log says why. No passenger waits for the cargo of
another, and nothing is thrown overboard while someone is still holding it.
The model reads the prompt once. Its attention needs the keys and values of every token before,
layer by layer. What was computed yesterday need not be computed today, if it was kept in a place
that outlives the process. A system prompt is the same for every user; a dialogue repeats its own
history with every turn. So the blocks are saved while the layers are still being computed, and
loaded while the first layers already run.
You are a helpful assistant. Answer briefly and say so when you are not sure. Please explain how
the store works, what happens when a daemon stops, and how many tokens were found. The answer is
yes, no, or perhaps; never make up a number. Thank you. Which harbour is the nearest? What did the
captain write down? Why was the load refused? How long does it take, and who is waiting?
First second third fourth fifth sixth seventh eighth ninth tenth. North east south west. Morning
evening night. Red green blue white black. River sea lake ocean island bridge shore tide wind storm.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape and seed of a tiny Llama."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 4
    #: vLLM's CPU attention takes 32, 64, 80, 96, 112, 128, …
    head_dim: int = 64
    mlp: int = 512
    max_position: int = 8192
    #: Any name that both torch and vLLM know: ``float32``, ``bfloat16``, ``float16``.
    dtype: str = "float32"
    #: Upper limit; the training text may give fewer tokens.
    vocabulary: int = 1024
    seed: int = 0

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV of one token over all layers."""
        size: int = getattr(torch, self.dtype).itemsize
        return 2 * self.kv_heads * self.head_dim * self.layers * size


def make_model(path: Path, spec: ModelSpec | None = None) -> Path:
    """Write the model of ``spec`` into the folder ``path``, and return the folder.

    A folder that already holds this very model is left as it is; one that holds another is
    overwritten file by file.
    """
    spec = spec or ModelSpec()
    stamp = path / "tinymodel.json"
    wanted = json.dumps({"recipe": RECIPE, **dataclasses.asdict(spec)}, indent=2, sort_keys=True)
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return path
    path.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    tokenizer = _train_tokenizer(spec.vocabulary)
    tokenizer.save(str(path / "tokenizer.json"))
    # A multiple of 64, as kernels like it; the rows above the tokenizer's are never used.
    rows = -(-tokenizer.get_vocab_size() // 64) * 64
    _write_json(path / "tokenizer_config.json", _tokenizer_config(spec))
    _write_json(path / "config.json", _config(spec, rows))
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    save_file(_weights(spec, rows, _words(tokenizer)), path / "model.safetensors", {"format": "pt"})
    # Last: a folder without it is not finished.
    stamp.write_text(wanted, "utf-8")
    return path


def model_digest(path: Path) -> str:
    """Digest all bytes of a model folder, to compare two."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True), "utf-8")


def _train_tokenizer(vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.splitlines(), trainer)
    return tokenizer


def _words(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that read as a word: a space and at least two letters."""
    words = []
    for token in range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        if text.isascii() and text[0] == " " and text[1:].isalpha() and len(text) > 2:
            words.append(token)
    return words


def _tokenizer_config(spec: ModelSpec) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "model_max_length": spec.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(spec: ModelSpec, rows: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": spec.dtype,
        "vocab_size": rows,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _weights(spec: ModelSpec, rows: int, words: list[int]) -> dict[str, torch.Tensor]:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator(device="cpu").manual_seed(spec.seed)

    def normal(std: float, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    def ones() -> torch.Tensor:
        return torch.ones(spec.hidden, dtype=dtype)

    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors = {"model.embed_tokens.weight": normal(EMBEDDING_STD, rows, spec.hidden)}
    for index in range(spec.layers):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(),
            f"{layer}.self_attn.q_proj.weight": normal(PROJECTION_STD, queries, spec.hidden),
            f"{layer}.self_attn.k_proj.weight": normal(PROJECTION_STD, keys, spec.hidden),
            f"{layer}.self_attn.v_proj.weight": normal(PROJECTION_STD, keys, spec.hidden),
            f"{layer}.self_attn.o_proj.weight": normal(PROJECTION_STD, spec.hidden, queries),
            f"{layer}.post_attention_layernorm.weight": ones(),
            f"{layer}.mlp.gate_proj.weight": normal(MLP_STD, spec.mlp, spec.hidden),
            f"{layer}.mlp.up_proj.weight": normal(MLP_STD, spec.mlp, spec.hidden),
            f"{layer}.mlp.down_proj.weight": normal(MLP_STD, spec.hidden, spec.mlp),
        }
    head = normal(PROJECTION_STD, rows, spec.hidden)
    # The model speaks in words only: every other token gets logit 0, far below the best word, so
    # greedy text is readable, never ends early and survives being sent back as text.
    mask = torch.zeros(rows, 1, dtype=dtype)
    mask[words] = 1
    tensors |= {"model.norm.weight": ones(), "lm_head.weight": head * mask}
    return tensors


def main(
    path: Annotated[Path, typer.Argument(help="Folder to write the model into.")],
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Make a tiny random Llama with a tokenizer and a chat template."""
    make_model(path, ModelSpec(layers=layers, seed=seed))
    typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
