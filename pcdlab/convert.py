"""GGUF → a folder transformers can load: float32 safetensors, config and tokenizer, all read from the file's metadata.

Knows the GGUF layout of the `llama` and `gemma3` architectures and of the `gpt2` (byte-level BPE) and `llama`
(SentencePiece BPE) tokenizers. Refuses to know any particular model, where files come from, or any framework:
weights are dequantised by the `gguf` library into numpy arrays, exactly, and written as they are.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pcdlab.errors import ModelError

__all__ = ["VERSION", "convert"]

#: Raised whenever the same GGUF would give different files, so that caches of converted models are renewed.
VERSION = 1


def convert(gguf: str | Path, folder: str | Path) -> Path:
    """Write the model in a GGUF file as a transformers folder.

    Parameters
    ----------
    gguf
        The GGUF file. Any quantisation the `gguf` library can dequantise.
    folder
        Where to write `config.json`, `model.safetensors` (float32), `tokenizer.json` and
        `tokenizer_config.json`. It must not exist; it appears complete or not at all.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ModelError
        When the file cannot be read, holds an architecture or tokenizer this module does not know, lacks or
        has in excess a tensor or a key, or when the folder exists or cannot be written.
    """
    source, target = Path(gguf), Path(folder)
    if target.exists():
        raise ModelError(f"{target} already exists; give convert() a folder that does not, or remove it first")
    try:
        config, weights, tokenizer, tokenizer_config = _read(source)
    # Damaged bytes can put any value anywhere, and the library then raises whatever numpy stumbled over.
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{source} is not a readable GGUF file ({error}); it may be incomplete or damaged: get it again"
        ) from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
            fresh = Path(temporary) / "model"
            fresh.mkdir()
            save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
            tokenizer.save(str(fresh / "tokenizer.json"))
            _write_json(fresh / "tokenizer_config.json", tokenizer_config)
            _write_json(fresh / "config.json", config)
            shutil.copymode(fresh / "config.json", fresh / "model.safetensors")  # safetensors keeps others out
            os.replace(fresh, target)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the converted model to {target}: {error}") from error
    return target


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Tokenizer, dict[str, Any]]:
    reader = GGUFReader(path)
    meta = _Metadata(path, {name: field.contents() for name, field in reader.fields.items()})
    config = meta.architecture.config(meta)
    weights = _weights(meta, reader, config)
    if len(meta.tokens) != config["vocab_size"]:
        raise meta.error(f"{len(meta.tokens)} tokens, but token_embd.weight has {config['vocab_size']} rows")
    return config, weights, _tokenizer(meta), _tokenizer_config(meta)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------
# Metadata


class _Metadata:
    """The key-value part of one GGUF file, with errors that name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        name = self["general.architecture"]
        if name not in _ARCHITECTURES:
            raise self.error(f"architecture {name!r}, and only {', '.join(_ARCHITECTURES)} can be converted")
        self.name: str = name
        self.architecture = _ARCHITECTURES[name]
        self.tokens: list[str] = self["tokenizer.ggml.tokens"]
        if len(set(self.tokens)) != len(self.tokens):
            raise self.error("tokenizer.ggml.tokens names a token twice")

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}")

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(f"the metadata has no {key}")
        return self.values[key]

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def of(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's own key; required where there is no default."""
        full = f"{self.name}.{key}"
        value = self[full] if default is None else self.get(full, default)
        if isinstance(value, list):
            raise self.error(f"{full} differs from layer to layer, which cannot be converted")
        if isinstance(value, float):
            return float(str(np.float32(value)))  # 1e-05 as it was meant, not 9.999999747378752e-06 as it is stored
        return value

    def token(self, role: str) -> tuple[int, str] | None:
        """Return id and text of the `bos`, `eos`, `unknown` or `padding` token."""
        index = self.get(f"tokenizer.ggml.{role}_token_id", None)
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise self.error(f"tokenizer.ggml.{role}_token_id is {index}, outside the {len(self.tokens)} tokens")
        return index, self.tokens[index]


# ---------------------------------------------------------------------------------------------------------------
# Architectures: configuration and tensor names


def _common_config(meta: _Metadata) -> dict[str, Any]:
    heads = meta.of("attention.head_count")
    head_dim = meta.of("attention.key_length", meta.of("embedding_length") // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.of(key, head_dim) != head_dim:
            raise meta.error(f"{meta.name}.{key} is {meta.of(key)}, but heads are {head_dim} wide")
    return {
        "dtype": "float32",
        "hidden_size": meta.of("embedding_length"),
        "intermediate_size": meta.of("feed_forward_length"),
        "num_hidden_layers": meta.of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.of("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.of("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.of("context_length"),
        **{
            f"{ours}_token_id": None if (token := meta.token(theirs)) is None else token[0]
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _rope(meta: _Metadata) -> dict[str, Any]:
    theta = meta.of("rope.freq_base", 10000.0)
    scaling = meta.of("rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": meta.of("rope.scaling.factor")}
    raise meta.error(f"{meta.name}.rope.scaling.type is {scaling!r}, and only 'none' and 'linear' can be converted")


def _llama_config(meta: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": _rope(meta),
        **_common_config(meta),
    }


def _gemma3_config(meta: _Metadata) -> dict[str, Any]:
    config = _common_config(meta)
    # GGUF files of this architecture need not spell out what is the same in all its models: every sixth layer
    # sees everything, the others a sliding window with rotary base 10,000 (Gemma 3 Technical Report, 2025, 2.1).
    period = meta.of("attention.sliding_window_pattern", 6)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["head_dim"],
        "sliding_window": meta.of("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % period == 0 else "sliding_attention"
            for layer in range(config["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": _rope(meta),
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.of("rope.freq_base_swa", 10000.0)},
        },
        **config,
    }


def _llama_weight(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Undo llama.cpp's row order of query and key projections.

    There, the rows of a head alternate between the two halves that rotary embedding pairs up; here, the halves
    follow one another.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name)
    if heads is None:
        return weight
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gemma3_weight(name: str, weight: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Undo the one that llama.cpp adds to every norm weight, because this architecture multiplies by 1 + weight."""
    return weight - np.float32(1) if name.endswith("norm") else weight


_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK = {
    **_LLAMA_BLOCK,
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class _Architecture:
    block: dict[str, str]  # tensor inside blk.N → module inside model.layers.N
    config: Callable[[_Metadata], dict[str, Any]]
    weight: Callable[[str, np.ndarray, dict[str, Any]], np.ndarray]  # GGUF's values → transformers' values


_ARCHITECTURES = {
    "llama": _Architecture(_LLAMA_BLOCK, _llama_config, _llama_weight),
    "gemma3": _Architecture(_GEMMA3_BLOCK, _gemma3_config, _gemma3_weight),
}


def _weights(meta: _Metadata, reader: GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Dequantise every tensor to float32 under its transformers name; complete `config` with what they tell."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in meta.architecture.block.items():
            names[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if not config["tie_word_embeddings"]:
        names["output"] = "lm_head"
    missing = [f"{name}.weight" for name in names if f"{name}.weight" not in tensors]
    if missing:
        raise meta.error(f"no tensor {missing[0]} ({len(missing)} missing); the file is incomplete")
    surplus = tensors.keys() - {f"{name}.weight" for name in names}
    if surplus:
        raise meta.error(f"tensor {min(surplus)} has no place in architecture {meta.name!r} as this converter knows it")
    weights = {}
    for theirs, ours in names.items():
        tensor = tensors[f"{theirs}.weight"]
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            weight = meta.architecture.weight(theirs.rpartition(".")[2], weight, config)
        except (NotImplementedError, ValueError) as error:
            raise meta.error(f"tensor {tensor.name} ({tensor.tensor_type.name}) cannot be read: {error}") from error
        weights[f"{ours}.weight"] = np.ascontiguousarray(weight)
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    return weights


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# The pattern of the cl100k vocabulary, with the longest run of digits that may stay together.
_CL100K_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    steps: Sequence[pre_tokenizers.PreTokenizer]
    nfc: bool = False  # text is brought into Unicode normal form C first
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # unless the metadata says otherwise


# What transformers' tokenizers of the models behind each name of `tokenizer.ggml.pre` do.
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer([_GPT2_SPLIT]),
    "smollm": _PreTokenizer([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT]),
    "llama-bpe": _PreTokenizer(_split(_CL100K_SPLIT % "{1,3}"), whole_words=True, add_bos=True),
    "qwen2": _PreTokenizer(_split(_CL100K_SPLIT % ""), nfc=True),
}


def _tokenizer(meta: _Metadata) -> Tokenizer:
    kind = meta["tokenizer.ggml.model"]
    types = meta["tokenizer.ggml.token_type"]
    if len(types) != len(meta.tokens):
        raise meta.error(f"tokenizer.ggml.token_type has {len(types)} entries for {len(meta.tokens)} tokens")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(meta)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(meta, types), True
    else:
        raise meta.error(f"tokenizer.ggml.model is {kind!r}, and only 'gpt2' and 'llama' can be converted")
    # As one list each, in order of id: a call per token takes minutes on large vocabularies.
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, type_ in zip(meta.tokens, types, strict=True)
            if type_ == TokenType.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text, type_ in zip(meta.tokens, types, strict=True)
            if type_ == TokenType.USER_DEFINED and not (kind == "llama" and _blank(text, type_))
        ]
    )
    bos, eos = (
        meta.token(role) if meta.get(f"tokenizer.ggml.add_{role}_token", default) else None
        for role, default in (("bos", add_bos), ("eos", False))
    )
    if bos or eos:
        before, after = [bos[1]] if bos else [], [eos[1]] if eos else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(text, index) for index, text in filter(None, (bos, eos))],
        )
    return tokenizer


def _byte_level_bpe(meta: _Metadata) -> tuple[Tokenizer, bool]:
    pre = meta["tokenizer.ggml.pre"]
    if pre not in _PRE_TOKENIZERS:
        raise meta.error(f"tokenizer.ggml.pre is {pre!r}, and only {', '.join(_PRE_TOKENIZERS)} can be converted")
    kind = _PRE_TOKENIZERS[pre]
    vocabulary = {text: index for index, text in enumerate(meta.tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    for merge in merges:
        if len(merge) != 2 or not all(part in vocabulary for part in (*merge, "".join(merge))):
            raise meta.error(f"tokenizer.ggml.merges has {' '.join(merge)!r}, which does not merge two tokens into one")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind.whole_words))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(kind.steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _blank(text: str, type_: int) -> bool:
    return type_ == TokenType.USER_DEFINED and not text.replace("▁", " ").strip()


def _sentencepiece_bpe(meta: _Metadata, types: Sequence[int]) -> Tokenizer:
    """Build the BPE tokenizer that segments as SentencePiece does (Kudo and Richardson, 2018, EMNLP).

    SentencePiece joins, again and again, the neighbours whose union has the best score. That is BPE once every
    way to split a piece into two pieces is a merge, ranked by the score of the piece.
    """
    tokens, scores = meta.tokens, meta["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise meta.error(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    # Runs of blanks are user-defined tokens, which SentencePiece cuts out before it joins anything. Joining them before
    # anything else comes to the same, and leaves them ordinary text.
    blank = [_blank(text, type_) for text, type_ in zip(tokens, types, strict=True)]
    pieces = [text.replace(" ", "▁") if run else text for text, run in zip(tokens, blank, strict=True)]
    rank = {
        piece: math.inf if run else score
        for piece, score, run, type_ in zip(pieces, scores, blank, types, strict=True)
        if run or type_ == TokenType.NORMAL
    }

    def splits() -> Iterator[tuple[float, int, str, str]]:
        for piece, score in rank.items():
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in rank and right in rank:
                    yield -score, len(piece), left, right

    merges = [(left, right) for *_, left, right in sorted(splits(), key=lambda split: split[:2])]
    unknown = meta.token("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token=None if unknown is None else unknown[1],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=1)] if prefix else [])
    )
    return tokenizer


def _tokenizer_config(meta: _Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one that takes tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.of("context_length"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = meta.token(theirs)
        if token is not None:
            config[f"{ours}_token"] = token[1]
    if template := meta.get("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return config
