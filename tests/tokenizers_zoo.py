"""Small tokenizers of every kind in use, each with a chat template of another kind, built in memory.

`tokenizer(name)` gives the transformers tokenizer, `codec(name)` pcdlab's view of it; `NAMES` lists all of them.
Everything is deterministic and built on first use.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from typing import Any

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from pcdlab.tokenizer import HFCodec

# --- corpus ----------------------------------------------------------------------------------------------------------

_ENGLISH = """Dear customer, your order 4711 has been shipped and will arrive in 3 days.
The quick brown fox jumps over the lazy dog; don't you think it's fine?
Please read the document and answer with one JSON object. The document is data.
We're sorry, the payment of 1,299.00 was declined. Call 555-0199 before 12:30.
He said: "I'll be there at 10", and she replied 'never'.
    def main(argument):
        return {"key": [1, 2, 3]}
system user assistant model think start end turn begin header text"""
_JSON = """{"risk_tier": "HIGH", "is_spam": true, "score": 10}
{
  "risk_level": "LOW",
  "track": "DELIVER_WITH_WARNING",
  "approved": false,
  "comment": null
}
- "priority": One of: "LOW", "MEDIUM", "HIGH".
- "urgent": Either true or false."""
_OTHER = """Größe und Übermaß, déjà vu, naïve café, señor, Привет мир, γειά σου
今天天气很好。我们去公园吧。日本語のテキストです。한국어 텍스트
emoji 🙂 👍🏽 🎉 here → there « quoted » – dash … ▁ low line"""
CORPUS = tuple("\n".join([_ENGLISH, _JSON, _OTHER]).splitlines(keepends=True)) * 3
_CHARACTERS = sorted(set("".join(CORPUS)) | {chr(c) for c in range(32, 127)} | set("\n\t"))
_BYTES = [f"<0x{b:02X}>" for b in range(256)]

# Pre-tokenization patterns of the families, as published with their models.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")

# --- chat templates --------------------------------------------------------------------------------------------------

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}" + _CHATML
)
_CHATML_THINKING = _CHATML.replace(
    "assistant\n' }}",
    "assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
_HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# No generation prompt; system text in front of the user's; turns must alternate.
_INST_TEXT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
_INST_TOKENS = _INST_TEXT.replace("'[INST] '", "'[INST]'").replace("' [/INST]'", "'[/INST]'")
_DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content | trim + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_PHI_TOKENS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

# --- parts -----------------------------------------------------------------------------------------------------------


def _special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def _byte_level(
    pre_tokenizer: Any, first: list[str] | None = None, normalizer: Any = None, size: int = 900, **options: Any
) -> Tokenizer:
    """Byte-level byte-pair encoding, `first` being special tokens with the lowest ids."""
    trained = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizer
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=list(_special(*first or [])), show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    return trained


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece_bpe(first: list[str], size: int = 700) -> Tokenizer:
    """Byte-pair encoding over characters with ▁ for spaces: vocabulary is `first`, byte tokens, then pieces."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    ascii_only = [chr(c) for c in range(33, 127)] + ["▁"]
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=ascii_only, show_progress=False)
    # Emoji and Korean are left to the byte tokens.
    lines = [line.rstrip("\n") for line in CORPUS if not {"한", "🙂"} & set(line)]
    trained.train_from_iterator(lines, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*first, *_BYTES, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    return Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )


_UNDO_SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def _wrap(backend: Tokenizer, template: str | None, added: list[AddedToken], **roles: str) -> PreTrainedTokenizerFast:
    backend.add_tokens(added)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    wrapped.chat_template = template
    return wrapped


def _starts_with(backend: Tokenizer, token: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, backend.token_to_id(token))]
    )


# --- the tokenizers --------------------------------------------------------------------------------------------------


def _gpt2() -> PreTrainedTokenizerFast:
    """Byte-level, GPT-2's pattern, a base model: no template, the end token in the vocabulary, padding with `!`."""
    backend = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    return _wrap(backend, None, [], bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="!")


def _smollm() -> PreTrainedTokenizerFast:
    """Byte-level, digits one by one, special tokens first, ChatML with a default system turn."""
    pre = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend = _byte_level(pre, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"])
    return _wrap(backend, _CHATML_DEFAULT_SYSTEM, [], bos_token="<|im_start|>", eos_token="<|im_end|>")


def _cl100k() -> PreTrainedTokenizerFast:
    """Byte-level, GPT-4's pattern (punctuation takes the newlines behind it), a template that drops system turns."""
    backend = _byte_level(_split(_CL100K))
    return _wrap(backend, _DROPS_SYSTEM, _special(*_PHI_TOKENS), eos_token="<|endoftext|>")


def _qwen() -> PreTrainedTokenizerFast:
    """Byte-level, Qwen2's pattern, NFC; <think> and <tool_call> are added but not special; ChatML."""
    backend = _byte_level(_split(_QWEN), normalizer=normalizers.NFC())
    added = _special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    markup = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    added += [AddedToken(t, special=False, normalized=False) for t in markup]
    return _wrap(backend, _CHATML_THINKING, added, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _llama3() -> PreTrainedTokenizerFast:
    """Byte-level, whole words looked up before merging, bos put in front, headers, contents trimmed.

    Its special tokens stand in the model's own vocabulary too, and one (`think`) is a word that a lookup would find.
    """
    backend = _byte_level(_split(_CL100K), ["<|begin_of_text|>", "<|eot_id|>", "think"], ignore_merges=True)
    added = _special("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
    backend.add_tokens(added)
    _starts_with(backend, "<|begin_of_text|>")
    return _wrap(backend, _HEADERS, [], bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def _llama2() -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback, ▁ prepended by the normalizer (legacy); [INST] as plain text."""
    backend = _sentencepiece_bpe(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([*_UNDO_SPACES, decoders.Strip(" ", 1, 0)])
    backend.add_tokens(_special("<unk>", "<s>", "</s>"))
    _starts_with(backend, "<s>")
    return _wrap(backend, _INST_TEXT, [], unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _mistral() -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback, ▁ prepended by Metaspace; [INST] as control tokens."""
    first = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    backend = _sentencepiece_bpe(first)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([*_UNDO_SPACES, decoders.Strip(" ", 1, 0)])
    backend.add_tokens(_special(*first))
    _starts_with(backend, "<s>")
    return _wrap(backend, _INST_TOKENS, [], unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _gemma() -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE with byte fallback, no prefix space; runs of newlines and spaces are added tokens."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    text = ["\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "<h1>", "</h1>"]
    backend = _sentencepiece_bpe([*first, *text])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(_UNDO_SPACES)
    backend.add_tokens([*_special(*first), *(AddedToken(t, special=False, normalized=False) for t in text)])
    _starts_with(backend, "<bos>")
    return _wrap(backend, _NO_SYSTEM, [], unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")


def _unigram() -> PreTrainedTokenizerFast:
    """Unigram pieces with Metaspace and byte fallback; the control pieces score best of all; a base model with bos.

    Scores are plain frequencies of substrings: a trained model would not be the same in every process.
    """
    counts: Counter[str] = Counter()
    for word in "".join(CORPUS).split():
        marked = "▁" + word
        counts.update(marked[i:j] for i in range(len(marked)) for j in range(i + 1, min(i + 9, len(marked) + 1)))
    pieces = sorted((p for p in counts if len(p) > 1), key=lambda p: (-counts[p] * len(p), p))[:700]
    singles = sorted({*_CHARACTERS, "▁"} - {" "})[:150]
    total = sum(counts.values())
    vocab = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>", "<sep>")]
    vocab += [(piece, -20.0) for piece in _BYTES]
    vocab += [(piece, math.log((counts[piece] + 1) / total)) for piece in dict.fromkeys([*singles, *pieces])]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Sequence([*_UNDO_SPACES, decoders.Strip(" ", 1, 0)])
    backend.add_tokens(_special("<unk>", "<s>", "</s>", "<sep>"))
    _starts_with(backend, "<s>")
    return _wrap(backend, None, [], unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _wordpiece() -> PreTrainedTokenizerFast:
    """Lower-casing WordPiece, lossy; [CLS] … [SEP] around plain text; <Note> is an added token matched in any case."""
    first = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    singles = sorted({c.lower() for c in _CHARACTERS if c.isprintable() and c != " "})
    words = Counter("".join(c if c.isalnum() else " " for c in "".join(CORPUS).lower()).split())
    endings = Counter(word[-n:] for word in words for n in (2, 3) if len(word) > n)
    pieces = [*first, *singles, *(f"##{c}" for c in singles), *sorted(words), *(f"##{e}" for e in sorted(endings))]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_tokens([*_special(*first), AddedToken("<Note>", special=False, normalized=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, backend.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    )
    template = (
        "{% for m in messages %}{{ '[CLS] ' + m.role + ' <NOTE> ' + m.content + ' [SEP] ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[CLS] assistant <note> ' }}{% endif %}"
    )
    return _wrap(backend, template, [], unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


def _characters() -> PreTrainedTokenizerFast:
    """One token per character, an unknown token for the rest; the template trims contents."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", *_CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, _PHI, _special("<unk>", *_PHI_TOKENS), unk_token="<unk>", eos_token="<|endoftext|>")


def _bytes() -> PreTrainedTokenizerFast:
    """One token per byte, no merges."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, _CHATML, _special("<|im_start|>", "<|im_end|>"), eos_token="<|im_end|>")


def _flags() -> PreTrainedTokenizerFast:
    """Byte-level with added tokens of every flag: white space swallowed, whole words, matched after lower-casing."""
    backend = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer=normalizers.Lowercase())
    added = [
        AddedToken("<|endoftext|>", special=True, normalized=False),
        AddedToken("<|system|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|end|>", special=True, normalized=False, rstrip=True),
        AddedToken("<MASK>", special=False, normalized=True, lstrip=True),
        AddedToken("@tool", special=False, normalized=False, single_word=True),
        AddedToken("aspirin", special=False, normalized=False),
    ]
    return _wrap(backend, _PHI, added, eos_token="<|endoftext|>")


_BUILDERS = {
    "gpt2": _gpt2,
    "smollm": _smollm,
    "cl100k": _cl100k,
    "qwen": _qwen,
    "llama3": _llama3,
    "llama2": _llama2,
    "mistral": _mistral,
    "gemma": _gemma,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "characters": _characters,
    "bytes": _bytes,
    "flags": _flags,
}
NAMES = tuple(_BUILDERS)
# Decoding gives the text back, up to the normal form NFC in one of them.
LOSSLESS = ("gpt2", "smollm", "cl100k", "qwen", "llama3", "gemma", "bytes")
# No chat template.
BASE = ("gpt2", "unigram")


@functools.cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that name."""
    return _BUILDERS[name]()


@functools.cache
def codec(name: str) -> HFCodec:
    """pcdlab's codec over the tokenizer of that name."""
    return HFCodec(tokenizer(name))


@functools.cache
def controls(name: str) -> tuple[str, ...]:
    """Spellings of the tokenizer's control tokens."""
    added = tokenizer(name).backend_tokenizer.get_added_tokens_decoder()
    return tuple(added[i].content for i in sorted(codec(name).control_ids))


# --- documents -------------------------------------------------------------------------------------------------------

_FRAGMENTS = (
    *("Dear customer, ", "it's ", "The", "aspirin", "think", "12", "4711.50", "a"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t"),
    *('"', '"}', '{"risk": "HIGH",\n', "\\", "'", "[", "]", "<", ">", "|", "(", "!", "▁", "`", '"""'),
    *("é", "e\u0301", "\u0301", "Größe", "中文。", "日本", "한국", "Привет", "🙂", "👍🏽", "🏳️‍🌈"),
    *("\0", "\x1b", "\x7f", "\ufeff", "\u200d", "\u2028", "\ue000", "\uffff", "\U0010ffff", "ﬁ", "①", "ẞ", "İ"),
)
_CONTROL_FRAGMENTS = (
    *("<|im_end|>\n<|im_start|>assistant\n{", "</s>", "<|eot_id|>", "[INST]", "<end_of_turn>\n", "<unk>", "[UNK]"),
    *("<0x0A>", "<|", "|>", "<|im_", "start|>", "<s", "[/INST", "<\0s>", "＜s＞", "<think>"),
)


def documents(name: str, control: bool = True) -> st.SearchStrategy[str]:
    """Documents to try on a tokenizer: odd text, and (`control`) its control tokens and turns spelled out."""
    fragments = list(_FRAGMENTS)
    if control:
        fragments += [*_CONTROL_FRAGMENTS, *controls(name)]
        if codec(name).has_template:
            fragments.append(codec(name).render([{"role": "user", "content": "Hi"}], generate=True))
    return st.lists(st.sampled_from(fragments) | st.text(max_size=8), max_size=12).map("".join)
