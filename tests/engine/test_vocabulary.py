from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from headway.engine.pretokenizers import CUTS
from headway.engine.tokenizer import Tokenizer
from headway.engine.vocabulary import Kind, read_gguf
from headway.engine.vocabulary_hub import read_directory
from headway.errors import CheckpointError, TemplateError
from tests.engine import tiny


def test_byte_level_vocabulary_reads_what_the_metadata_say() -> None:
    vocabulary = read_gguf(tiny.bpe_metadata())
    assert vocabulary.kind is Kind.BYTE_LEVEL
    assert (vocabulary.bos_id, vocabulary.eos_id) == (1, 2)
    assert vocabulary.special_ids == {0, 1, 2}
    assert vocabulary.eos_ids == {0, 2}, "known ends of a turn end answers too"
    assert vocabulary.templates == {"default": tiny.CHATML}


def test_smollm_cuts_digits_one_by_one_and_keeps_the_spaces_before_them() -> None:
    backend = read_gguf(tiny.bpe_metadata()).backend
    cut = backend.pre_tokenizer
    assert cut is not None
    assert [piece for piece, _ in cut.pre_tokenize_str("x  12")] == ["x", "ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'm 123  ok", ["I", "'m", "Ġ123", "Ġ", "Ġok"]),
        ("llama-bpe", "I'M 12345\n\n x", ["I", "'M", "Ġ", "123", "45", "ĊĊ", "Ġx"]),
        ("llama-bpe", "it'Sx", ["it", "'S", "x"]),
        ("qwen2", "it'Sx", ["it", "'S", "x"]),
        ("gpt-2", "it'Sx", ["it", "'", "Sx"]),
        ("qwen2", "a 12\n  b", ["a", "Ġ", "1", "2", "Ċ", "Ġ", "Ġb"]),
        ("deepseek-v3", "ab 1234 #x", ["ab", "Ġ", "123", "4", "Ġ#", "x"]),
        ("deepseek-coder", "ab 12\n", ["ab", "Ġ", "1", "2", "Ċ"]),
        ("falcon", "a==12345", ["a", "==", "123", "45"]),
    ],
)
def test_named_cuts(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in CUTS[pre].build().pre_tokenize_str(text)] == pieces


def test_every_named_cut_compiles_and_loses_nothing() -> None:
    text = "Hello  wörld's 12345\r\n\t中文 ﷽ == x"
    spelled = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
    for name, cut in CUTS.items():
        assert "".join(piece for piece, _ in cut.build().pre_tokenize_str(text)) == spelled, name


def test_llama3_takes_whole_pieces_before_merging_and_begins_with_bos() -> None:
    merges = tiny.bpe_metadata()["tokenizer.ggml.merges"]
    whole = tiny.bpe_metadata()["tokenizer.ggml.tokens"].index("Ġthe")
    metadata = tiny.bpe_metadata(pre="llama-bpe", merges=merges[:0], add_bos_token=None)
    tokenizer = Tokenizer(read_gguf(metadata))
    assert tokenizer.encode(" the") == [1, whole]


def test_sentencepiece_merges_by_score_falls_back_to_bytes_and_adds_prefix_and_bos() -> None:
    tokenizer = tiny.spm()
    spell = tokenizer.token_bytes
    assert [spell(i) for i in tokenizer.encode("hello world")] == [b"<s>", b" hello", b" world"]
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert [spell(i) for i in ids] == [b" ", b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.decode(ids) == "€"


def test_sentencepiece_without_prefix() -> None:
    tokenizer = Tokenizer(read_gguf(tiny.spm_metadata(add_space_prefix=False, add_bos_token=False)))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hello")] == [b"he", b"llo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_better_score_merges_first() -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [2, 1, 1, 1, 1, 1], "add_space_prefix": False}
    changes |= {"bos_token_id": None, "eos_token_id": None}
    for scores, pieces in (([0.0, 0, 0, 0, -2, -1], ["a", "bc"]), ([0.0, 0, 0, 0, -1, -2], ["ab", "c"])):
        tokenizer = Tokenizer(read_gguf(tiny.spm_metadata(scores=scores, **changes)))
        assert [tokenizer.token_text(i) for i in tokenizer.encode("abc")] == pieces


def test_gemma_merges_by_position_and_spells_runs_of_spaces() -> None:
    tokens = ["<unk>", "  ", "▁", "a", "▁a"]
    metadata = tiny.spm_metadata(
        tokens=tokens, scores=[-1000.0, -1000.0, -3.0, -4.0, -1.0], token_type=[2, 4, 1, 1, 1], bos_token_id=None
    )
    del metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer(read_gguf(metadata | {"general.architecture": "gemma3"}))
    assert tokenizer.encode("  a") == [1, 3], "the run of spaces has no true score, but stands first"
    assert tokenizer.decode([1, 3]) == "  a"
    assert tokenizer._vocabulary.tokens[1] == "▁▁"


def test_text_never_merges_into_a_control_or_byte_token() -> None:
    tokens = ["<unk>", "<", "s", ">", "<s", "<s>", "<0x41>"]
    metadata = tiny.spm_metadata(
        tokens=tokens, scores=[0.0] * 7, token_type=[2, 1, 1, 1, 1, 3, 6], add_space_prefix=False, add_bos_token=False
    )
    metadata |= {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 5}
    assert Tokenizer(read_gguf(metadata)).encode("<s>") == [4, 3]


_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
    ({"model": None}, "tokenizer.ggml.model is missing"),
    ({"model": 3}, "tokenizer.ggml.model is 3"),
    ({"pre": "martian"}, "tokenizer.ggml.pre is 'martian'.*smollm"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
    ({"tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'"),
    ({"tokens": ["a", 3]}, r"tokenizer.ggml.tokens\[1\] is 3"),
    ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "holds 'a' twice, at 0 and 2"),
    ({"tokens": ["x" * 70_000], "token_type": [1]}, r"tokens\[0\] has 70000 characters"),
    ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 values for"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": ["a b c"]}, r"tokenizer.ggml.merges\[0\] is 'a b c'"),
    ({"merges": ["ab"]}, r"tokenizer.ggml.merges\[0\] is 'ab'"),
    ({"merges": ["q q"]}, r"tokenizer.ggml.merges\[0\] is 'q q'"),
    ({"merges": [True]}, r"tokenizer.ggml.merges\[0\] is True"),
    ({"bos_token_id": 10**6}, "bos_token_id is 1000000, outside"),
    ({"eos_token_id": -1}, "eos_token_id is -1, outside"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"eos_token_id": True}, "eos_token_id is True"),
    ({"eot_token_id": 10**9}, "eot_token_id is 1000000000, outside"),
    ({"add_bos_token": 1}, "add_bos_token is 1"),
    ({"tokenizer__chat_template": 7}, "tokenizer.chat_template is 7"),
]


@pytest.mark.parametrize(("changes", "message"), _WRONG, ids=[message[:50] for _, message in _WRONG])
def test_hostile_metadata_is_refused_with_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tiny.bpe_metadata(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 values"),
        ({"scores": ["x"] * 293}, r"tokenizer.ggml.scores"),
        ({"scores": [float("nan")] * 293}, "scores holds a NaN"),
        ({"token_type": [9] * 293}, r"token_type\[0\] is 9"),
        ({"token_type": [6] * 293}, r"tokens\[0\] is '<unk>', but its type says a byte"),
    ],
)
def test_hostile_sentencepiece_metadata(changes: dict[str, Any], message: str) -> None:
    size = len(tiny.spm_metadata()["tokenizer.ggml.tokens"])
    for key, value in changes.items():
        sized = value[:1] * size if value and len(value) > 1 else value
        with pytest.raises(CheckpointError, match=message):
            read_gguf(tiny.spm_metadata(**{key: sized}))


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.text(max_size=3), max_size=5)
)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(sorted(tiny.spm_metadata())), value=_VALUES, spm=st.booleans())
def test_any_value_under_any_key_is_read_or_refused(key: str, value: Any, spm: bool) -> None:
    metadata = (tiny.spm_metadata if spm else tiny.bpe_metadata)() | {key: value}
    # Any other error fails the test.
    with contextlib.suppress(CheckpointError, TemplateError):
        Tokenizer(read_gguf(metadata)).encode("the <s> end")


def _write_directory(path: Path, backend: Backend, **files: Any) -> None:
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")


def test_directory_gives_the_same_ids_as_metadata(tmp_path: Path) -> None:
    reference = tiny.bpe()
    _write_directory(
        tmp_path,
        read_gguf(tiny.bpe_metadata()).backend,
        tokenizer_config__json={"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"},
        chat_template__jinja=tiny.CHATML,
        generation_config__json={"eos_token_id": [2, 7, 10**9]},
        config__json={"eos_token_id": 9},
    )
    tokenizer = Tokenizer(read_directory(tmp_path))
    for text in ("the quick <|im_end|> 中文 👨‍👩‍👧 <tool_call>", "", "  x  12"):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.encode(text, allow_special=True) == reference.encode(text, allow_special=True)
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {0, 2, 7, 9}, "<|endoftext|> is a known end of a turn"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat is not None
    assert tokenizer.fingerprint() == reference.fingerprint()


def test_directory_tokens_that_the_config_alone_lists_are_added(tmp_path: Path) -> None:
    listed = {
        "900": {"content": "<|tool|>", "special": True},
        "901": {"content": "<think>", "special": False},
        "0": {"content": "<|endoftext|>", "special": True},
        "x": "junk",
    }
    backend = read_gguf(tiny.bpe_metadata()).backend
    _write_directory(tmp_path, backend, tokenizer_config__json={"added_tokens_decoder": listed})
    tokenizer = Tokenizer(read_directory(tmp_path))
    size = tiny.bpe().vocabulary_size
    assert tokenizer.encode("<|tool|><think>", allow_special=True) == [size, size + 1]
    assert tokenizer.special_ids == {0, 1, 2, size}
    assert tokenizer.encode("<think>") == [size + 1]
    assert size not in tokenizer.encode("<|tool|>")


def test_directory_named_templates_and_flags(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, "junk"]
    config = {"chat_template": named, "bos_token": "<|im_start|>", "add_bos_token": True, "eos_token": "<|im_end|>"}
    _write_directory(tmp_path, read_gguf(tiny.bpe_metadata()).backend, tokenizer_config__json=config)
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("R")
    assert read_directory(tmp_path).templates == {"default": "D", "tool_use": "T", "rag": "R"}
    tokenizer = Tokenizer(read_directory(tmp_path))
    assert tokenizer.chat is not None
    assert (tokenizer.chat.render([], ()), tokenizer.chat.render([], ({"type": "function"},))) == ("D", "T")
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("")[:1] == [1]


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "[]"), ("tokenizer.json", '{"model": 3}')]
)
def test_directory_with_a_broken_file_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        read_directory(tmp_path)


def _damaged(**changes: Any) -> dict[str, Any]:
    """Return a tokenizer.json with values put at places such as ``model__unk_token``."""
    raw: dict[str, Any] = json.loads(read_gguf(tiny.spm_metadata()).backend.to_str())
    for place, value in changes.items():
        *above, last = place.split("__")
        part = raw
        for name in above:
            part = part[name]
        part[last] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        # The library panics, aborts the process, or lets a list of four thousand million entries be made.
        (_damaged(model__continuing_subword_prefix="##"), r"does not begin with the prefix '##'"),
        (_damaged(model__vocab__zzz=3_000_000_000), "gives a token the id 3000000000; ids up to 3999999 are read"),
        (_damaged(post_processor__special_tokens={}), r"tokenizer\.json is not a tokenizer"),
        (_damaged(truncation={"max_length": 1, "stride": 9, "strategy": "LongestFirst", "direction": "Right"}), None),
        (_damaged(padding={"strategy": {"Fixed": 10_000}, "direction": "Right", "pad_to_multiple_of": None,
                           "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}), None),
        (_damaged(decoder={"type": ["x"]}), r"tokenizer\.json is not a tokenizer"),
        (_damaged(model__type=[]), r"tokenizer\.json is not a tokenizer"),
    ],
)  # fmt: skip
def test_hostile_directory_is_refused_by_name_and_bounds_of_its_own_are_not_followed(
    raw: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if message is None:
        ids = Tokenizer(read_directory(tmp_path)).encode("hello world", allow_special=True)
        assert ids == tiny.spm().encode("hello world", allow_special=True)
    else:
        with pytest.raises(CheckpointError, match=message):
            read_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/x.jinja"])
def test_safetensors_hostile_a_link_out_of_the_directory_is_not_read(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    _write_directory(folder, read_gguf(tiny.bpe_metadata()).backend)
    read_directory(folder)
    (folder / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="link out of its directory"):
        read_directory(folder)


def test_links_of_a_hub_cache_into_its_own_blobs_are_read(tmp_path: Path) -> None:
    model = tmp_path / "models--a--b"
    snapshot, blobs = model / "snapshots" / "0123", model / "blobs"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    _write_directory(blobs, read_gguf(tiny.bpe_metadata()).backend, t="T")
    (snapshot / "tokenizer.json").symlink_to(blobs / "tokenizer.json")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (snapshot / name).symlink_to(blobs / "t")
    assert read_directory(snapshot).templates == {"default": "T", "tool_use": "T"}


def test_a_large_tokenizer_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**33)  # sparse
    with pytest.raises(CheckpointError, match="has 8589934592 bytes; at most"):
        read_directory(tmp_path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_value_in_a_directorys_files_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files: dict[str, Any] = {
        "tokenizer.json": json.loads(read_gguf(tiny.spm_metadata()).backend.to_str()),
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "added_tokens_decoder": {}},
        "generation_config.json": {"eos_token_id": [1, 2]},
    }
    for _ in range(data.draw(st.integers(1, 2))):
        part = files[data.draw(st.sampled_from(sorted(files)))]
        while True:
            if not part:
                break
            keys = list(part)[:9] if isinstance(part, dict) else list(range(min(3, len(part))))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(part[key], dict | list) or data.draw(st.booleans()):
                part[key] = data.draw(_VALUES)
                break
            part = part[key]
    folder = tmp_path_factory.mktemp("any")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    # Any other error fails the test.
    with contextlib.suppress(CheckpointError):
        tokenizer = Tokenizer(read_directory(folder))
        tokenizer.encode("the <s> end\n中")
        tokenizer.decode([1, 40, 300])


def test_directory_without_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        read_directory(tmp_path)


def test_a_character_that_the_vocabulary_lacks_is_its_unknown_token(tmp_path: Path) -> None:
    """Also where that is a control token, and where a control token stands in the same text."""
    files = json.loads(read_gguf(tiny.spm_metadata()).backend.to_str())
    files["model"]["byte_fallback"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(files))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tokenizer = Tokenizer(read_directory(tmp_path))
    unknown = tokenizer.encode("<unk>", add_special_tokens=False, allow_special=True)
    assert len(unknown) == 1
    assert unknown[0] in tokenizer.encode("the <s> end\n中")
