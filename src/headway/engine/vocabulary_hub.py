"""From a Hugging Face directory's tokenizer files to a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from headway.engine.vocabulary import MAX_TOKENS, TURN_ENDS, Kind, Vocabulary, set_ends
from headway.errors import CheckpointError
from headway.models.checkpoint.safetensors import inside

T = TypeVar("T")
_MAX_JSON_BYTES = 1 << 27  # the largest vocabularies take a quarter of that
_MAX_TEMPLATE_BYTES = 1 << 20


def read_directory(path: Path) -> Vocabulary:
    """Return the vocabulary of a directory with tokenizer.json; CheckpointError names the file that is wrong."""
    source = path / "tokenizer.json"
    if not source.is_file():
        raise CheckpointError(
            f"{path} holds no tokenizer.json; fetch it with the model, or convert the slow tokenizer with transformers."
        )
    raw = _read_json(source)
    _refuse_what_aborts(source, raw)
    backend = _tried(source, lambda: Tokenizer.from_file(str(source)))
    backend.no_truncation()
    backend.no_padding()
    # What is wrong with a normalizer or a post-processor shows when it runs.
    _tried(source, lambda: backend.encode("A text, 1.\n"))
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    _add_configured(backend, config)
    ids = backend.get_vocab(with_added_tokens=True)
    largest = max(ids.values(), default=-1)
    if largest >= MAX_TOKENS:
        raise CheckpointError(f"{source} gives a token the id {largest}; ids up to {MAX_TOKENS - 1} are read.")
    tokens: list[str | None] = [None] * (largest + 1)
    for token, index in ids.items():
        tokens[index] = token
    kind = _kind(raw)
    bos_id, eos_id = (ids.get(_content(config.get(key))) for key in ("bos_token", "eos_token"))
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    special |= {index for index in (bos_id, eos_id) if index is not None}
    _follow_flags(backend, config, bos_id, eos_id)
    return Vocabulary(
        backend=backend,
        tokens=tokens,
        kind=kind,
        byte_values=_byte_values(ids) if kind is Kind.SENTENCEPIECE else {},
        strip_first_space=kind is Kind.WORDPIECE or _strips(raw),
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(_end_ids(path, eos_id, len(tokens)))
        | {index for index in special if tokens[index] in TURN_ENDS},
        templates=_templates(path, config),
        special_ids=frozenset(special),
    )


def _tried(source: Path, use: Callable[[], T]) -> T:
    """Return what tokenizers makes of a file; CheckpointError for one that it cannot use."""
    try:
        return use()
    except BaseException as error:
        # It raises bare Exception for some files and panics over others, which is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{source} is not a tokenizer: {error}; fetch it again.") from None


def _refuse_what_aborts(source: Path, raw: Mapping[str, Any]) -> None:
    """Refuse merges that are shorter than the prefix they are to begin with: tokenizers ends the process over them."""
    model = raw.get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(prefix, str) or not prefix:
        return
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        right = parts[-1] if isinstance(parts, list) and parts else None
        if not isinstance(right, str) or not right.startswith(prefix):
            raise CheckpointError(
                f"{source} merges {str(merge)[:60]!r}, whose second part does not begin with the prefix"
                f" {prefix[:20]!r}; the file is damaged: fetch it again."
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path.parent, path, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__} where an object is needed; fetch it again.")
    return value


def _read(folder: Path, path: Path, most_bytes: int) -> bytes:
    """Return a file of the model's directory; CheckpointError for a link out of it and for one that is too large."""
    size = inside(folder, path).stat().st_size
    if size > most_bytes:
        raise CheckpointError(f"{path} has {size} bytes; at most {most_bytes} are read.")
    return path.read_bytes()


def _content(token: Any) -> str:
    """Return a token's text: some files write it as a string, others as an object with flags."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else ""


def _add_configured(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json alone lists, as transformers does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    entries = listed if isinstance(listed, Mapping) else {}
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0]) if str(item[0]).isdigit() else -1):
        content = _content(entry)
        if content and content not in known and isinstance(entry, Mapping):
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = AddedToken(content, special=bool(entry.get("special", False)), **flags)
            (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])


def _follow_flags(backend: Tokenizer, config: Mapping[str, Any], bos_id: int | None, eos_id: int | None) -> None:
    """Where tokenizer.json has no post-processor, BOS and EOS follow the flags of tokenizer_config.json."""
    if backend.post_processor is not None:
        return
    bos = (_content(config.get("bos_token")), bos_id) if config.get("add_bos_token") and bos_id is not None else None
    eos = (_content(config.get("eos_token")), eos_id) if config.get("add_eos_token") and eos_id is not None else None
    set_ends(backend, bos, eos)


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a pipeline's steps: sequences are flattened."""
    if not isinstance(part, Mapping):
        return
    inner = part.get("decoders") or part.get("pretokenizers")
    if part.get("type") == "Sequence" and isinstance(inner, list):
        for step in inner:
            yield from _steps(step)
    else:
        yield part


def _kind(raw: Mapping[str, Any]) -> Kind:
    types = [step.get("type") for step in _steps(raw.get("decoder"))]
    if "ByteLevel" in types or "ByteLevel" in [step.get("type") for step in _steps(raw.get("pre_tokenizer"))]:
        return Kind.BYTE_LEVEL
    return Kind.WORDPIECE if "WordPiece" in types else Kind.SENTENCEPIECE


def _strips(raw: Mapping[str, Any]) -> bool:
    for step in _steps(raw.get("decoder")):
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step.get("type") == "Metaspace":
            return bool(step.get("add_prefix_space", step.get("prepend_scheme", "always") != "never"))
    return False


def _byte_values(ids: Mapping[str, int]) -> dict[int, int]:
    return {ids[token]: value for value in range(256) if (token := f"<0x{value:02X}>") in ids}


def _end_ids(path: Path, eos_id: int | None, size: int) -> set[int]:
    ends = set() if eos_id is None else {eos_id}
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        ends |= {index for index in listed if isinstance(index, int) and 0 <= index < size}
    return ends


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name; files win over the config, as in transformers."""
    found: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found |= {entry["name"]: entry["template"] for entry in given if _is_named_template(entry)}
    files = [*sorted((path / "additional_chat_templates").glob("*.jinja")), path / "chat_template.jinja"]
    for file in files:
        if file.is_file():
            name = "default" if file.name == "chat_template.jinja" else file.stem
            found[name] = _read(path, file, _MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    return {name: source for name, source in found.items() if source}


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(isinstance(entry.get(key), str) for key in ("name", "template"))
