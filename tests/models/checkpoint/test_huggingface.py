from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.errors import CheckpointError
from headway.models.checkpoint import open_checkpoint
from tests.models.checkpoint import build

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_directory_opens_with_every_weight(architecture: str, tmp_path: Path) -> None:
    config = build.tiny(architecture=architecture, layers=2, attention_bias=architecture == "qwen2")
    checkpoint = open_checkpoint(build.hf_directory(tmp_path, config))
    assert checkpoint.config.architecture == architecture
    assert checkpoint.metadata == {}
    expected = build.weights(config)
    assert set(checkpoint.names()) == set(expected)
    assert checkpoint.weight_bytes == sum(array.nbytes for array in expected.values())
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), array)
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        checkpoint.tensor("x")


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    folder = build.hf_directory(tmp_path, eos_token_id=1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert open_checkpoint(folder).config.eos == (1, 2)


def test_a_model_that_transformers_saves_opens(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, eos_token_id=3,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    assert set(checkpoint.names()) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), tensor.numpy())


def transformers_head(folder: Path, hidden: Any) -> Any:
    """Return logits that transformers' head gives for hidden states, from the directory."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.lm_head(torch.from_numpy(hidden)).detach().numpy()


def our_head(folder: Path, hidden: Any) -> Any:
    checkpoint = open_checkpoint(folder)
    return hidden @ checkpoint.tensor(TABLE if checkpoint.config.tied else HEAD).float32().T


@pytest.mark.parametrize("case", ["absent", "equal", "different", "table absent"])
def test_tied_embeddings_with_tie_word_embeddings_true(case: str, tmp_path: Path) -> None:
    arrays = build.weights(build.tiny())
    if case == "absent":
        del arrays[HEAD]
    elif case == "equal":
        arrays[HEAD] = arrays[TABLE]
    elif case == "table absent":
        del arrays[TABLE]
    folder = build.hf_directory(tmp_path, arrays=arrays, tie_word_embeddings=True)
    assert open_checkpoint(folder).config.tied == (case != "different")
    hidden = np.random.default_rng(5).standard_normal((3, 32)).astype(np.float32)
    np.testing.assert_allclose(our_head(folder, hidden), transformers_head(folder, hidden), rtol=1e-4, atol=1e-5)


def test_tied_embeddings_false_and_absent_is_a_clear_error(tmp_path: Path) -> None:
    arrays = build.weights(build.tiny())
    del arrays[HEAD]
    folder = build.hf_directory(tmp_path, arrays=arrays, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"no lm_head.weight .*tie_word_embeddings to true"):
        open_checkpoint(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma3_opens(prefix: str, tmp_path: Path) -> None:
    config = build.tiny(architecture="gemma3", tied=True)
    arrays = build.weights(config)
    moved = {prefix + name.removeprefix("model."): array for name, array in arrays.items()}
    moved["vision_tower.patch"] = np.zeros((2, 2), np.float32)
    folder = build.hf_directory(tmp_path, arrays=moved)
    inner = {**build.hf_config(config), "model_type": "gemma3_text"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 2]})
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.tied
    assert checkpoint.config.eos == (1, 2)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), array)


def test_two_names_for_one_weight_are_refused(tmp_path: Path) -> None:
    arrays = build.weights(build.tiny())
    arrays["language_model.model.norm.weight"] = arrays["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"two tensors that mean 'model.norm.weight'"):
        open_checkpoint(build.hf_directory(tmp_path, arrays=arrays))


def test_no_pickle_is_ever_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(build.hf_config(build.tiny())))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin', and no pickle is ever read"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no GGUF file"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_what_a_path_holds_decides(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file or directory"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no model"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").write_bytes(build.tiny_gguf())
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.bin").write_bytes(build.tiny_gguf())
    assert open_checkpoint(tmp_path / "b.bin").config.architecture == "llama"  # by its magic, not by its name
    (tmp_path / "c.gguf").write_bytes(build.tiny_gguf())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(a.gguf, c.gguf\)"):
        open_checkpoint(tmp_path)
    hugging_face = build.hf_directory(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="open its directory"):
        open_checkpoint(hugging_face / "model.safetensors")
    (hugging_face / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has weights but no config.json"):
        open_checkpoint(hugging_face)


def test_a_config_error_names_the_directory(tmp_path: Path) -> None:
    folder = build.hf_directory(tmp_path, num_attention_heads=0)
    with pytest.raises(CheckpointError, match="num_attention_heads is 0") as caught:
        open_checkpoint(folder)
    assert str(folder) in caught.value.message


def test_a_shape_that_the_config_does_not_give(tmp_path: Path) -> None:
    arrays = build.weights(build.tiny())
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
    with pytest.raises(CheckpointError, match=r"k_proj.weight' has shape \(8, 32\), but its config needs \(16, 32\)"):
        open_checkpoint(build.hf_directory(tmp_path, arrays=arrays))
