"""Checkpoint folders: layouts that work, and faults that are named."""

import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.kernels.weights import Dense
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.model.checkpoints import SHAPE, configs, reference, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.model.weight_sizes import num_bytes

CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> ModelRunner:
    return ModelRunner.load(
        ExecutorConfig(model=str(folder), **settings), CacheConfig(16, 8), 128, 8
    )


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-biased", "qwen2"])
def test_sharded_equals_single(tmp_path: Path, name: str) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    save(configs()[name], single)
    save(configs()[name], sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    row = [5, 6, 7, 8, 9]
    results = [
        load(folder).run(make_plan([Work(Row(Blocks(8, 16), list(row)))])).scores[0]
        for folder in (single, sharded)
    ]
    assert results[0] is not None
    assert results[1] is not None
    assert list(results[0].top_logprobs[0]) == list(results[1].top_logprobs[0])


def test_fused_weights_and_progress(tmp_path: Path) -> None:
    save(configs()["qwen2"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    config = ModelConfig.read(tmp_path)
    seen: list[tuple[str, float]] = []
    weights = load_weights(config, torch.float32, CPU, lambda what, done: seen.append((what, done)))
    layer = "model.layers.1."
    qkv, gate_up = weights.layers[1].qkv, weights.layers[1].gate_up
    assert isinstance(qkv, Dense)
    assert isinstance(gate_up, Dense)
    for kind, fused in (("weight", qkv.matrix), ("bias", qkv.bias)):
        parts = [stored[f"{layer}self_attn.{p}_proj.{kind}"] for p in "qkv"]
        assert fused is not None
        assert torch.equal(fused, torch.cat(parts))
    parts = [stored[f"{layer}mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert torch.equal(gate_up.matrix, torch.cat(parts))
    assert len(weights.layers) == len(weights.layers[:9]) == 3
    seen.clear()
    assert len(weights.resident().layers) == 3
    assert [done for _, done in seen] == [1 / 3, 2 / 3, 1.0]
    assert num_bytes(weights) == sum(tensor.nbytes for tensor in stored.values())


def copied(file: Path) -> dict[str, torch.Tensor]:
    """A file's tensors, which the library maps, in memory of their own."""
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def resident(file: Path) -> int:
    """Bytes of a mapped file that this process has in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:  # the first line of a mapping
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_weights_are_not_in_memory_twice(tmp_path: Path) -> None:
    """What was copied from the file goes, and the embedding is the file itself."""
    shape = {**SHAPE, "vocab_size": 4096, "intermediate_size": 4096}
    theirs = tmp_path / "theirs"  # which transformers may still have mapped
    save(LlamaConfig(**shape, tie_word_embeddings=True), theirs, dtype=torch.bfloat16)
    stored = load_file(theirs / "model.safetensors")
    ours = shutil.copytree(theirs, tmp_path / "ours")
    file = ours / "model.safetensors"
    weights = load_weights(ModelConfig.read(ours), torch.bfloat16, CPU)
    layers = weights.resident().layers
    assert resident(file) < 64 * mmap.PAGESIZE
    embedding = weights.embedding
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert resident(file) >= embedding.nbytes - 2 * mmap.PAGESIZE
    weights.release()
    assert resident(file) < 64 * mmap.PAGESIZE
    # What was released is read again, and nobody else notices.
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(layers[0].input_norm, stored["model.layers.0.input_layernorm.weight"])
    file.unlink()
    del weights
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])


def test_unaligned_weights(tmp_path: Path) -> None:
    """A writer that pads nothing may put numbers at odd places."""
    save(configs()["llama"], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = copied(file)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    data = file.read_bytes()[8:]
    file.write_bytes((size + 1).to_bytes(8, "little") + data[:size] + b" " + data[size:])
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert torch.equal(weights.embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(
        weights.layers[2].post_norm, stored["model.layers.2.post_attention_layernorm.weight"]
    )


def test_rows_joined_by_group_are_sorted(tmp_path: Path) -> None:
    """GPT-NeoX has each head's queries, keys and values side by side; old files have masks, too,
    and one may call the head as transformers does."""
    config = configs()["gpt_neox-serial"]
    config.attention_bias, config.tie_word_embeddings = True, False
    save(config, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    before = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    module = "gpt_neox.layers.1.attention.query_key_value"
    qkv = before.layers[1].qkv
    assert isinstance(qkv, Dense) and qkv.bias is not None
    heads = stored[f"{module}.weight"].view(4, 3, 16, 64)
    assert torch.equal(qkv.matrix, torch.cat([heads[:, i].reshape(64, 64) for i in range(3)]))
    biases = stored[f"{module}.bias"].view(4, 3, 16)
    assert torch.equal(qkv.bias, torch.cat([biases[:, i].flatten() for i in range(3)]))
    stored["lm_head.weight"] = stored.pop("embed_out.weight")
    stored["gpt_neox.layers.1.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    stored["gpt_neox.layers.1.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(stored, file, {"format": "pt"})
    head = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU).head
    assert isinstance(head, Dense)
    assert torch.equal(head.matrix, stored["lm_head.weight"])


def test_names_of_the_first_checkpoints(tmp_path: Path) -> None:
    """GPT-2's own file has no `transformer.`, but masks; its matrices are transposed either way."""
    save(configs()["gpt2"], tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    stored["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(stored, file, {"format": "pt"})
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert torch.equal(weights.embedding, stored["wte.weight"])
    assert weights.positions is not None
    assert torch.equal(weights.positions, stored["wpe.weight"])
    for name, module in (("qkv", "attn.c_attn"), ("down", "mlp.c_proj")):
        part = getattr(weights.layers[1], name)
        assert isinstance(part, Dense)
        assert torch.equal(part.matrix, stored[f"h.1.{module}.weight"].t())
        assert part.bias is not None
        assert torch.equal(part.bias, stored[f"h.1.{module}.bias"])


def test_positions_behind_others(tmp_path: Path) -> None:
    save(configs()["opt"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.decoder.embed_positions.weight"]
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert weights.positions is not None
    assert torch.equal(weights.positions, stored[2:])


def _stored_ends(folder: Path, stored: tuple[str, ...], differ: bool = False) -> None:
    """Leave of the tied embedding and head what is in `stored`, under these names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tied = tensors.pop("model.embed_tokens.weight")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    for name in stored:
        tensors[name] = tied.clone()
    if differ:
        tensors["lm_head.weight"] *= 2.0
    save_file(tensors, file)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_tied_weights_are_one_tensor(tmp_path: Path, stored: tuple[str, ...]) -> None:
    """Under whichever name they are stored."""
    model = save(configs()["llama-tied"], tmp_path)
    _stored_ends(tmp_path, stored)
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert isinstance(weights.head, Dense)
    assert weights.head.matrix is weights.embedding
    assert torch.equal(weights.embedding, model.get_input_embeddings().weight)


def test_tied_weights_that_differ_are_not_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, which says so too."""
    save(configs()["llama-tied"], tmp_path)
    _stored_ends(tmp_path, (EMBEDDING, HEAD), differ=True)
    model = reference(tmp_path, torch.float32)
    weights = load_weights(ModelConfig.read(tmp_path), torch.float32, CPU)
    assert isinstance(weights.head, Dense)
    assert torch.equal(weights.embedding, model.get_input_embeddings().weight)
    assert torch.equal(weights.head.matrix, model.get_output_embeddings().weight)
    assert "they are not tied" in caplog.text


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    stored = load_file(folder / "model.safetensors")
    edit(stored)
    save_file(stored, folder / "model.safetensors")


NORM = "model.layers.2.input_layernorm.weight"

FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json"]),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ["config.json"]),
    "not an object": (lambda f: (f / "config.json").write_text("[]"), ["config.json", "object"]),
    "architecture": (
        lambda f: edit_json(f / "config.json", architectures=["BertLMHeadModel"]),
        ["config.json", "architectures", "BertLMHeadModel", "model_type 'llama'"],
    ),
    "no architecture": (
        lambda f: edit_json(f / "config.json", architectures=None),
        ["architectures"],
    ),
    "quantized": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
        ["quantization_config"],
    ),
    "activation": (
        lambda f: edit_json(f / "config.json", hidden_act="gelu"),
        ["config.json", "hidden_act", "gelu"],
    ),
    "field type": (
        lambda f: edit_json(f / "config.json", hidden_size="wide"),
        ["config.json", "hidden_size"],
    ),
    "heads": (
        lambda f: edit_json(f / "config.json", num_key_value_heads=3),
        ["num_attention_heads", "num_key_value_heads"],
    ),
    "rope type": (
        lambda f: edit_json(
            f / "config.json", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}
        ),
        ["config.json", "rope", "spiral"],
    ),
    "partial rope": (
        lambda f: edit_json(
            f / "config.json",
            rope_parameters={
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        ),
        ["rope_parameters", "partial"],
    ),
    "generation config": (
        lambda f: (f / "generation_config.json").write_text("?"),
        ["generation_config.json"],
    ),
    "end of a text": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
        ["generation_config.json: eos_token_id '</s>'", "not a token id"],
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        ["model.safetensors", "model.safetensors.index.json"],
    ),
    "truncated weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]
        ),
        ["model.safetensors"],
    ),
    "missing weight": (
        lambda f: _edit_weights(f, lambda w: w.pop(NORM)),
        ["missing", NORM],
    ),
    "extra weight": (
        lambda f: _edit_weights(f, lambda w: w.update({"model.extra.weight": torch.zeros(2)})),
        ["does not have", "model.extra.weight"],
    ),
    "shape": (
        lambda f: _edit_weights(f, lambda w: w.update({NORM: torch.zeros(65)})),
        ["model.safetensors", NORM, "[65]", "[64]"],
    ),
    "integer weight": (
        lambda f: _edit_weights(f, lambda w: w.update({NORM: torch.zeros(64, dtype=torch.int8)})),
        [NORM, "I8"],
    ),
    "bad index": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        ),
        ["model.safetensors.index.json"],
    ),
    "list as index": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text("[]"),
        ),
        ["model.safetensors.index.json", "not a weight index"],
    ),
    "deep index": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text("[" * 100_000),
        ),
        ["model.safetensors.index.json", "not a weight index"],
    ),
    "index leads outside": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.norm.weight": "../other.safetensors"}}'
            ),
        ),
        ["index.json", "../other.safetensors"],
    ),
    "a weight in two files": (
        lambda f: (
            (f / "model.safetensors").rename(f / "part-1.safetensors"),
            save_file({NORM: torch.ones(64)}, f / "part-2.safetensors"),
            (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "part-1.safetensors", NORM: "part-2.safetensors"}})
            ),
        ),
        [NORM, "part-1.safetensors", "part-2.safetensors"],
    ),
    "missing shard": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"model.norm.weight": "part-1.safetensors"}}'
            ),
        ),
        ["part-1.safetensors", "missing"],
    ),
}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_faults_are_named(tmp_path: Path, name: str) -> None:
    damage, words = FAULTS[name]
    save(configs()["llama"], tmp_path)
    damage(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_no_folder() -> None:
    with pytest.raises(UnsupportedModel, match="no-such-model"):
        load(Path("no-such-model"))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"context_length": 0}, "context_length"),
        ({"context_length": 257}, "context_length"),
        ({"device": "tpu9"}, "tpu9"),
        ({"device": "meta"}, "meta"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], word: str) -> None:
    save(configs()["llama"], tmp_path)
    with pytest.raises(InvalidRequest, match=word):
        load(tmp_path, **settings)


def test_eos_and_context(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 9]}')
    runner = load(tmp_path, context_length=100)
    assert runner.eos_token_ids == (4, 9)
    assert runner.context_length == 100


def test_old_style_rope_scaling_is_read(tmp_path: Path) -> None:
    """Checkpoints of before transformers 5 say `rope_theta` and `rope_scaling`."""
    save(configs()["llama-linear"], tmp_path)
    token_ids = [5, 6, 7, 8, 9]

    def run() -> list[float]:
        scores = load(tmp_path).run(make_plan([Work(Row(Blocks(8, 16), token_ids))])).scores[0]
        assert scores is not None
        return [float(value) for value in scores.top_logprobs[0]]

    new = run()
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(
        json.dumps(raw | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}})
    )
    assert run() == new


def test_float16_checkpoints_run_in_float32(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path, dtype=torch.float16)
    assert load(tmp_path).dtype == FLOAT32
    assert load(tmp_path, dtype="bfloat16").dtype == BFLOAT16


def test_longrope_uses_one_set_of_factors(tmp_path: Path) -> None:
    config = configs()["llama"]
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    }
    model = save(config, tmp_path)
    token_ids = [3 + i for i in range(20)]
    runner = load(tmp_path)
    assert runner.context_length == 64
    short = runner.run(make_plan([Work(Row(Blocks(8, 16), list(token_ids)))])).scores[0]
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, -1], -1)
    assert short is not None
    assert abs(float(short.logprobs[0]) - float(expected.max())) < 1e-4

    runner = load(tmp_path, context_length=128)
    assert runner.context_length == 128
    token_ids = [3 + i for i in range(100)]
    long = runner.run(make_plan([Work(Row(Blocks(8, 16), list(token_ids)))])).scores[0]
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, -1], -1)
    assert long is not None
    assert abs(float(long.logprobs[0]) - float(expected.max())) < 1e-4


def test_pool_size(tmp_path: Path) -> None:
    save(configs()["llama"], tmp_path)

    def blocks(cache: CacheConfig, **settings: Any) -> int:
        executor = ExecutorConfig(model=str(tmp_path), **settings)
        return ModelRunner.load(executor, cache, 128, 8).num_blocks

    # float32, 3 layers, keys and values, 2 heads of 16: 768 bytes a token.
    assert blocks(CacheConfig(16, 5), kv_memory_bytes=10**9) == 5
    assert blocks(CacheConfig(16), kv_memory_bytes=768 * 16 * 10 + 100) == 10
    assert blocks(CacheConfig(1), kv_memory_bytes=768 * 33) == 33
    # By itself a small model takes no more than 64 full contexts.
    assert blocks(CacheConfig(16)) == 64 * 256 // 16
    with pytest.raises(UnsupportedModel, match="no memory"):
        blocks(CacheConfig(16), kv_memory_bytes=1000)
