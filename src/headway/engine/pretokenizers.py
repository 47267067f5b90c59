"""How a byte-level BPE vocabulary cuts text before merging: one entry per name that ``tokenizer.ggml.pre`` may hold."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from headway.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS,)
_QWEN2 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANKS,)
_QWEN35 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BLANKS,)

# Words with their case kept together: upper* lower+, or upper+ lower*.
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = (rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",)
_GPT4O = (
    rf"{_LOWER_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
)

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Cut:
    """Regular expressions applied one after the other, each splitting off its matches."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    """Cut by GPT-2's expression after the splits."""
    late: tuple[str, ...] = ()
    """Splits after GPT-2's expression."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as it is."""
    add_bos: bool = False
    """Begin texts with BOS where the file does not say."""

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer, which ends in the byte alphabet."""
        before = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2)
        after = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.late]
        steps = [*before, byte_level, *after]
        return byte_level if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2_CUT = Cut(gpt2=True)
_DIGITS_CUT = Cut(splits=(r"\p{N}",), gpt2=True)
_LLAMA3_CUT = Cut(splits=_LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_CUT = Cut(splits=_QWEN2)
_GPT4O_CUT = Cut(splits=_GPT4O)
_DEEPSEEK3_CUT = Cut(splits=_DEEPSEEK3)

CUTS: dict[str, Cut] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), _GPT2_CUT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_CUT),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_CUT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut(splits=_LLAMA3)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2_CUT),
    "qwen35": Cut(splits=_QWEN35),
    "tekken": Cut(splits=_TEKKEN, ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_CUT),
    **dict.fromkeys(("deepseek-v3", "deepseek3"), _DEEPSEEK3_CUT),
    "deepseek-coder": Cut(splits=_DEEPSEEK_CODER),
    "falcon": Cut(splits=(r"[\p{P}$+<=>^~|`]+",), gpt2=True, late=(r"[0-9][0-9][0-9]",)),
}


def find_cut(name: str) -> Cut:
    """Return the entry of that name; CheckpointError names it and the known ones."""
    cut = CUTS.get(name)
    if cut is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known here; known are "
            f"{', '.join(sorted(CUTS))}. Use the model's Hugging Face directory (tokenizer.json) instead."
        )
    return cut
