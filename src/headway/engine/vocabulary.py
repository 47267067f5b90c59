"""From a GGUF file's metadata to a vocabulary; everything in it is taken for untrusted input."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from headway.engine.pretokenizers import Cut, find_cut
from headway.errors import CheckpointError

MAX_TOKENS = 4_000_000
"""Ids from here on are refused: a list of all ids is held."""
_MAX_TOKEN_CHARS = 65_536


class Kind(StrEnum):
    """How a token's text spells its bytes."""

    BYTE_LEVEL = "byte level"
    """Each character stands for one byte (GPT-2's alphabet)."""
    SENTENCEPIECE = "sentencepiece"
    """UTF-8 with U+2581 for a space; ``<0xAB>`` is one byte."""
    WORDPIECE = "wordpiece"
    """Whole words; a leading ``##`` continues the word before."""


class TokenType(IntEnum):
    """The values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a Tokenizer is made of, wherever it came from."""

    backend: Tokenizer
    """Encodes; knows the added tokens, and BOS and EOS as its post-processor."""
    tokens: Sequence[str | None]
    """The text of each id as the vocabulary spells it; None where an id names no token."""
    kind: Kind
    byte_values: Mapping[int, int]
    """Ids of SentencePiece byte tokens."""
    strip_first_space: bool
    """The decoded text of a whole sequence loses one leading space."""
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends an answer; the one that the vocabulary calls EOS is ``eos_id``."""
    eos_id: int | None
    templates: Mapping[str, str]
    """Chat templates by name; empty for a base model."""
    special_ids: frozenset[int] = frozenset()


# Control tokens that end a turn whatever the file's EOS is (llama.cpp calls them end-of-generation tokens).
TURN_ENDS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|end_of_text|>"}
    | {"<end_of_turn>", "<eos>", "</s>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>"}
)


def read_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary that GGUF metadata describe; CheckpointError names the key and the value that is wrong."""
    fields = _Fields(metadata)
    model = fields.text("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(fields)
    if model == "llama":
        return _sentencepiece(fields)
    raise CheckpointError(
        f"tokenizer.ggml.model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). "
        "Use the model's Hugging Face directory (tokenizer.json) instead."
    )


class _Fields:
    """Checked access to metadata: every getter refuses a wrong type, a wrong length and an id out of range."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._tokens()
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            index = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            token = self.tokens[index]
            raise CheckpointError(
                f"tokenizer.ggml.tokens holds {_short(token)} twice, at {index} and {self.ids[token]}; "
                "the file is damaged: download or convert it again."
            )
        self.types = self._types()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._metadata.get(key)
        if value is None:
            return default
        # bool is an int to Python, not to GGUF.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            raise CheckpointError(f"{key} is {_short(value)}, where {wanted} is needed; the file is damaged.")
        return value

    def text(self, key: str) -> str:
        value = self.get(key, str)
        if value is None:
            raise CheckpointError(f"{key} is missing, so this file holds no tokenizer; use a complete GGUF file.")
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, bool, default))

    def token_id(self, key: str) -> int | None:
        value = self.get(key, int)
        if value is not None and not 0 <= value < len(self.tokens):
            raise CheckpointError(f"{key} is {value}, outside the vocabulary of {len(self.tokens)} tokens.")
        return None if value is None else int(value)

    def sequence(self, key: str, item: type | tuple[type, ...], length: int | None = None) -> list[Any] | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, str | bytes | Mapping) or not (isinstance(value, Sequence) or hasattr(value, "tolist")):
            raise CheckpointError(f"{key} is {_short(value)}, where an array is needed; the file is damaged.")
        items: list[Any] = value if isinstance(value, list) else list(getattr(value, "tolist", lambda: value)())
        if length is not None and len(items) != length:
            raise CheckpointError(f"{key} has {len(items)} values for {length} tokens; the file is damaged.")
        if not all(map(_is_instance_of(item), items)):
            index = next(i for i, entry in enumerate(items) if not _is_instance_of(item)(entry))
            raise CheckpointError(f"{key}[{index}] is {_short(items[index])}, of a wrong type; the file is damaged.")
        return items

    def _tokens(self) -> list[str]:
        key = "tokenizer.ggml.tokens"
        tokens = self.sequence(key, str)
        if not tokens:
            raise CheckpointError(f"{key} is {'missing' if tokens is None else 'empty'}: this file holds no tokenizer.")
        if len(tokens) > MAX_TOKENS:
            raise CheckpointError(f"{key} has {len(tokens)} tokens, more than {MAX_TOKENS}; the file is damaged.")
        longest = max(range(len(tokens)), key=lambda index: len(tokens[index]))
        if len(tokens[longest]) > _MAX_TOKEN_CHARS:
            raise CheckpointError(
                f"{key}[{longest}] has {len(tokens[longest])} characters, more than {_MAX_TOKEN_CHARS}."
            )
        return tokens

    def _types(self) -> list[int]:
        key = "tokenizer.ggml.token_type"
        types = self.sequence(key, int, len(self.tokens))
        if types is None:
            return [TokenType.NORMAL] * len(self.tokens)
        unknown = set(types) - {0, *TokenType}
        if unknown:
            value = min(unknown)
            raise CheckpointError(f"{key}[{types.index(value)}] is {value}; known are 1 to 6.")
        return types

    def of_type(self, *wanted: TokenType) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in wanted]

    def merges(self) -> list[tuple[str, str]] | None:
        key = "tokenizer.ggml.merges"
        rules = self.sequence(key, str)
        if rules is None:
            return None
        pairs = [tuple(rule.split(" ")) for rule in rules]
        ids = self.ids
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
                raise CheckpointError(
                    f"{key}[{index}] is {_short(rules[index])}, which is not two known tokens whose union is known; "
                    "the file is damaged: download or convert it again."
                )
        return pairs

    def templates(self) -> dict[str, str]:
        found = {}
        default = self.get("tokenizer.chat_template", str)
        if default:
            found["default"] = default
        for name in self.sequence("tokenizer.chat_templates", str) or ():
            source = self.get(f"tokenizer.chat_template.{name}", str)
            if source:
                found[name] = source
        return found


def _is_instance_of(kind: type | tuple[type, ...]) -> Any:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _byte_level(fields: _Fields) -> Vocabulary:
    cut = find_cut(fields.get("tokenizer.ggml.pre", str, "default"))
    merges = fields.merges()
    if merges is None:
        raise CheckpointError("tokenizer.ggml.merges is missing, but the 'gpt2' tokenizer needs it; convert it again.")
    backend = Tokenizer(BPE(vocab=fields.ids, merges=merges, ignore_merges=cut.ignore_merges))
    backend.pre_tokenizer = cut.build()
    backend.decoder = decoders.ByteLevel()
    return _finish(fields, backend, Kind.BYTE_LEVEL, {}, strip_first_space=False, cut=cut)


def _sentencepiece(fields: _Fields) -> Vocabulary:
    gemma = fields.get("general.architecture", str, "").startswith("gemma")
    if gemma:
        _respell_blanks(fields)
    merges = fields.merges()
    if merges is None:
        merges = _derive_merges(fields, by_position=gemma)
    unknown = fields.token_id("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = fields.ids.get("<unk>")
    backend = Tokenizer(
        BPE(
            vocab=fields.ids,
            merges=merges,
            unk_token=None if unknown is None else fields.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True) and not gemma
    if gemma:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme="first" if prefix else "never", split=False
        )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    byte_values = {index: _byte_value(index, fields.tokens[index]) for index in fields.of_type(TokenType.BYTE)}
    return _finish(fields, backend, Kind.SENTENCEPIECE, byte_values, strip_first_space=prefix)


def _respell_blanks(fields: _Fields) -> None:
    """Gemma's runs of spaces are stored as spaces, but text reaches the vocabulary with U+2581 in their place."""
    for index in fields.of_type(TokenType.USER_DEFINED, TokenType.NORMAL):
        token = fields.tokens[index]
        spelled = "▁" * len(token)
        if token and not token.strip(" ") and spelled not in fields.ids:
            del fields.ids[token]
            fields.tokens[index] = spelled
            fields.ids[spelled] = index


def _derive_merges(fields: _Fields, *, by_position: bool) -> list[tuple[str, str]]:
    """Return the merges that the scores imply: every way to put a token together from two, the best token first.

    Gemma's order is the position in the vocabulary: its user-defined tokens have no true scores. Control and byte
    tokens are left out: text must never merge into one.
    """
    usable = fields.of_type(TokenType.NORMAL, TokenType.USER_DEFINED)
    tokens, ids = fields.tokens, fields.ids
    if by_position:
        groups: Any = ((index,) for index in usable)
    else:
        scores = fields.sequence("tokenizer.ggml.scores", (int, float), len(tokens))
        if scores is None:
            raise CheckpointError(
                "tokenizer.ggml.scores is missing, and so is tokenizer.ggml.merges; convert it again."
            )
        if any(score != score for score in scores):
            raise CheckpointError("tokenizer.ggml.scores holds a NaN; the file is damaged.")
        usable.sort(key=scores.__getitem__, reverse=True)
        groups = (tuple(group) for _, group in itertools.groupby(usable, key=scores.__getitem__))
    merges: list[tuple[str, str]] = []
    for group in groups:
        pairs = [
            (left, right)
            for token in map(tokens.__getitem__, group)
            for cut in range(len(token) - 1, 0, -1)
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids
        ]
        if len(group) > 1:
            pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
        merges += pairs
    return merges


def _byte_value(index: int, token: str) -> int:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            pass
    raise CheckpointError(f"tokenizer.ggml.tokens[{index}] is {_short(token)}, but its type says a byte like '<0x0A>'.")


def _finish(
    fields: _Fields,
    backend: Tokenizer,
    kind: Kind,
    byte_values: Mapping[int, int],
    *,
    strip_first_space: bool,
    cut: Cut | None = None,
) -> Vocabulary:
    bos_id = fields.token_id("tokenizer.ggml.bos_token_id")
    eos_id = fields.token_id("tokenizer.ggml.eos_token_id")
    control = fields.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    special = {index for index in control if fields.tokens[index]}
    special |= {index for index in (bos_id, eos_id) if index is not None}
    backend.add_special_tokens([AddedToken(fields.tokens[i], normalized=False, special=True) for i in sorted(special)])
    backend.add_tokens(
        [
            AddedToken(fields.tokens[i], normalized=False, special=False)
            for i in fields.of_type(TokenType.USER_DEFINED)
            # A run of U+2581 is reached by merging, as text has been normalised by then.
            if i not in special and fields.tokens[i].strip("▁")
        ]
    )
    ends = {fields.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    ends |= {index for index in special if fields.tokens[index] in TURN_ENDS}
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", cut.add_bos if cut else True)
    add_eos = fields.flag("tokenizer.ggml.add_eos_token", False)
    set_ends(
        backend,
        (fields.tokens[bos_id], bos_id) if add_bos and bos_id is not None else None,
        (fields.tokens[eos_id], eos_id) if add_eos and eos_id is not None else None,
    )
    unused = set(fields.of_type(TokenType.UNUSED))
    return Vocabulary(
        backend=backend,
        tokens=[None if index in unused else token for index, token in enumerate(fields.tokens)],
        kind=kind,
        byte_values=byte_values,
        strip_first_space=strip_first_space,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=frozenset(index for index in ends if index is not None),
        templates=fields.templates(),
        special_ids=frozenset(special),
    )


def set_ends(backend: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make the backend put BOS before and EOS behind a text when special tokens are asked for."""
    if bos is None and eos is None:
        return
    single = ["$A:0"]
    if bos:
        single.insert(0, f"{bos[0]}:0")
    if eos:
        single.append(f"{eos[0]}:0")
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=sorted({end for end in (bos, eos) if end})
    )
