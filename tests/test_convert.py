"""GGUF files written here, from tiny random models, come back as the same models and tokenizers."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded import embedded_model
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from pcdlab.convert import convert
from pcdlab.errors import ModelError
from pcdlab.models import catalogue

CONTROL = ["<|end|>", "<|start|>", "<|pad|>"]
CORPUS = ["The parcel 12345 was held at the depot.", 'it\'s {"risk": "HIGH"},\n\n  naïve café 東京 🎉 2024-10-31'] * 2
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"


@cache
def trained_bpe() -> Tokenizer:
    """Return a byte-level BPE tokenizer that splits digits, with three control tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=CONTROL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bpe_keys(tokenizer: Tokenizer, pre: str = "smollm") -> dict[str, Any]:
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if token in CONTROL else TokenType.NORMAL) for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    keys: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file; matrices in the given quantisation, vectors in float32."""
    writer = GGUFWriter(path, keys["general.architecture"])
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        if key != "general.architecture":  # the writer adds it itself
            add[type(value)](key, value)
    for name, value in tensors.items():
        if value.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of query or key weights in llama.cpp's order: [half 0, half 1] of a head → alternating."""
    rows = weight.shape[0]
    order = np.arange(rows).reshape(heads, 2, rows // heads // 2).transpose(0, 2, 1).reshape(-1)
    return weight[order]


def numpy_state(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
GEMMA3_NAMES = LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_tensors(state: dict[str, np.ndarray], names: dict[str, str], tied: bool) -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in state.items():
        module = name.removesuffix(".weight")
        if tied and module == "lm_head":
            continue
        if module.startswith("model.layers."):
            _, _, layer, inner = module.split(".", 3)
            tensors[f"blk.{layer}.{names[inner]}.weight"] = value
        else:
            tensors[f"{names[module]}.weight"] = value
    return tensors


def tiny_llama(
    tied: bool = True, scaling: dict[str, Any] | None = None
) -> tuple[LlamaForCausalLM, dict[str, Any], dict[str, np.ndarray]]:
    """Return a random model with grouped queries, and the keys and tensors of its GGUF file."""
    tokenizer_keys = bpe_keys(trained_bpe())
    rope = {"rope_type": "default", "rope_theta": 5000.0} | (scaling or {})
    config = LlamaConfig(
        vocab_size=len(tokenizer_keys["tokenizer.ggml.tokens"]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    tensors = gguf_tensors(numpy_state(model), LLAMA_NAMES, tied)
    for layer in range(2):
        for name, heads in (("attn_q", 4), ("attn_k", 2)):
            key = f"blk.{layer}.{name}.weight"
            tensors[key] = interleave(tensors[key], heads)
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": config.vocab_size,
        **tokenizer_keys,
    }
    return model, keys, tensors


def logits(model: torch.nn.Module, vocabulary: int) -> torch.Tensor:
    ids = torch.randint(vocabulary, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


# --- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_computes_the_same_logits(tmp_path: Path, kind: GGMLQuantizationType, tied: bool) -> None:
    model, keys, tensors = tiny_llama(tied)
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors, kind), tmp_path / "m")
    with torch.no_grad():  # the reference takes the rounded weights, so that nothing else can differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                rounded = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded))
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    torch.testing.assert_close(logits(again, vocabulary), logits(model, vocabulary), atol=1e-5, rtol=0)
    for name in ("rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert getattr(again.config, name) == getattr(model.config, name)
    assert (again.config.bos_token_id, again.config.eos_token_id, again.config.pad_token_id) == (1, 0, 2)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    model, keys, tensors = tiny_llama(scaling={"rope_type": "linear", "factor": 4.0})
    keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors), tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    vocabulary = model.config.vocab_size
    torch.testing.assert_close(logits(again, vocabulary), logits(model, vocabulary), atol=1e-5, rtol=0)


def test_gemma3_computes_the_same_logits(tmp_path: Path) -> None:
    keys = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 7,
        "gemma3.context_length": 128,
        "gemma3.embedding_length": 32,
        "gemma3.feed_forward_length": 48,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.value_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 8,
        "gemma3.rope.freq_base": 1_000_000.0,
        **spm_keys(),
    }
    config = Gemma3TextConfig(
        vocab_size=len(keys["tokenizer.ggml.tokens"]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5)
    tensors = gguf_tensors(numpy_state(model), GEMMA3_NAMES, tied=True)
    tensors = {name: value + np.float32(name.endswith("norm.weight")) for name, value in tensors.items()}
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors), tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert again.config.layer_types == model.config.layer_types
    vocabulary = model.config.vocab_size
    torch.testing.assert_close(logits(again, vocabulary), logits(model, vocabulary), atol=1e-4, rtol=0)


# --- byte-level BPE --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm")
    _, keys, tensors = tiny_llama()
    return convert(write_gguf(path / "m.gguf", keys, tensors), path / "m")


@given(
    st.text(alphabet=st.sampled_from("The parcel 0123456789\n\tnaïve東京🎉'{}\":,<|>endst"), max_size=60)
    | st.text(max_size=30)
)
@settings(max_examples=100, deadline=None)
def test_smollm_tokenizer_gives_the_ids_of_the_original(smollm_like: Path, text: str) -> None:
    converted = Tokenizer.from_file(str(smollm_like / "tokenizer.json"))
    ids = converted.encode(text).ids
    assert ids == trained_bpe().encode(text).ids
    assert converted.decode(ids, skip_special_tokens=False) == text


def test_transformers_takes_the_tokenizer_as_it_is(smollm_like: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_like)
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.tokenize("<|start|>") == ["<|start|>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|pad|>")
    assert tokenizer("at").input_ids == tokenizer("at", add_special_tokens=False).input_ids
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|start|>user\nhi<|end|>"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "Ġ", "Ġx", "Ġ.", "Ċ"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "Ġ.", "Ċ"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "Ġ", "Ġx", "Ġ.Ċ"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "Ġ.Ċ"]),
    ],
)
def test_each_kind_splits_text_its_own_way(tmp_path: Path, pre: str, words: list[str]) -> None:
    _, keys, tensors = tiny_llama()
    keys["tokenizer.ggml.pre"] = pre
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345  x .\n")] == words
    composed = tokenizer.encode("e\u0301").tokens == tokenizer.encode("\u00e9").tokens
    assert composed == (pre == "qwen2")
    assert ("TemplateProcessing" in tokenizer.to_str()) == (pre == "llama-bpe")


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_ends_are_added_where_the_metadata_says_so(tmp_path: Path, bos: bool, eos: bool) -> None:
    _, keys, tensors = tiny_llama()
    keys |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bare = tokenizer("at", add_special_tokens=False).input_ids
    assert tokenizer("at").input_ids == [1] * bos + bare + [0] * eos
    assert tokenizer("at", "at").input_ids == 2 * ([1] * bos + bare + [0] * eos)


# --- SentencePiece BPE -----------------------------------------------------------------------------------------

PIECES = {"▁a": -1.0, "ab": -2.0, "▁ab": -3.0, "ba": -4.0, "aba": -5.0, "bb": -6.0, "▁bb": -7.0, "é": -8.0}
PIECES |= {letter: -20.0 - rank for rank, letter in enumerate("▁ab")}
BLANKS = ["\n", "\n\n", "\n\n\n", "  ", "   "]


def spm_keys() -> dict[str, Any]:
    rows = [("<pad>", -1000.0, TokenType.CONTROL), ("<eos>", -1000.0, TokenType.CONTROL)]
    rows += [("<bos>", -1000.0, TokenType.CONTROL), ("<unk>", -1000.0, TokenType.UNKNOWN)]
    rows += [(blank, -1000.0, TokenType.USER_DEFINED) for blank in BLANKS]
    rows += [("<tag>", -1000.0, TokenType.USER_DEFINED)]
    rows += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    rows += [(piece, score, TokenType.NORMAL) for piece, score in PIECES.items()]
    tokens, scores, types = zip(*rows, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def sentencepiece_bpe(text: str) -> list[str]:
    """Segment as SentencePiece does: cut out user-defined runs, then join the best-scored neighbours to the end."""
    text = text.replace(" ", "▁")
    runs = sorted((blank.replace(" ", "▁") for blank in BLANKS), key=len, reverse=True)
    parts: list[tuple[str, bool]] = []
    while text:
        run = next((run for run in runs if text.startswith(run)), None)
        parts.append((run or text[0], run is not None))
        text = text[len(run or text[0]) :]
    while True:
        joins = [
            (-PIECES[left + right], at)
            for at, ((left, frozen), (right, frozen_too)) in enumerate(pairwise(parts))
            if not frozen and not frozen_too and left + right in PIECES
        ]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [(parts[at][0] + parts[at + 1][0], False)]
    out = []
    for part, frozen in parts:
        known = frozen or part in PIECES
        out += [part] if known else [f"<0x{byte:02X}>" for byte in part.encode()]
    return out


@pytest.fixture(scope="module")
def spm_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm")
    _, keys, tensors = tiny_llama()
    keys = {key: value for key, value in keys.items() if not key.startswith("tokenizer.")} | spm_keys()
    tensors["token_embd.weight"] = np.zeros((len(keys["tokenizer.ggml.tokens"]), 64), np.float32)
    return convert(write_gguf(path / "m.gguf", keys, tensors), path / "m")


@given(st.text(alphabet="aab bé\nZ", max_size=30))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_segments_and_decodes(spm_like: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(spm_like / "tokenizer.json"))
    # Beyond the longest run of a blank, ours may cut a longer one elsewhere than from the left.
    if "\n" * 4 not in text and " " * 4 not in text:
        assert tokenizer.encode(text, add_special_tokens=False).tokens == sentencepiece_bpe(text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_sentencepiece_added_tokens_and_start(spm_like: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(spm_like)
    assert tokenizer.tokenize("a<tag>\n\nb<eos>") == ["a", "<tag>", "\n\n", "b", "<eos>"]
    assert tokenizer("ab").input_ids[0] == tokenizer.bos_token_id == 2
    added = set(tokenizer.get_added_vocab())
    assert "<tag>" in added  # a control token is one people gave a name,
    assert not added & {"\n\n", "▁▁"}  # blank space is text


def test_space_prefix_comes_and_goes(tmp_path: Path) -> None:
    _, keys, tensors = tiny_llama()
    keys = {key: value for key, value in keys.items() if not key.startswith("tokenizer.")} | spm_keys()
    keys["tokenizer.ggml.add_space_prefix"] = True
    tensors["token_embd.weight"] = np.zeros((len(keys["tokenizer.ggml.tokens"]), 64), np.float32)
    folder = convert(write_gguf(tmp_path / "m.gguf", keys, tensors), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode("ab a", add_special_tokens=False)
    assert encoded.tokens == ["▁ab", "▁a"]
    assert tokenizer.decode(encoded.ids) == "ab a"


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    _, keys, tensors = tiny_llama()
    return write_gguf(path, keys, tensors).read_bytes()


def fails(path: Path, reason: str) -> None:
    """Check that converting fails with the file's name and a reason, and leaves nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(ModelError, match=reason) as caught:
        convert(path, path.parent / "out")
    assert str(path) in str(caught.value)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7'.*llama, gemma3"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, but heads are 16 wide"),
        ({"llama.block_count": 3}, r"no tensor blk\.2\..* \(9 missing\)"),
        ({"llama.block_count": 1}, r"tensor blk\.1\..*no place"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merges has 'a b c'"),
        ({"tokenizer.ggml.merges": ["a ☃"]}, "merges has 'a ☃'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "names a token twice"),
        ({"tokenizer.ggml.tokens": ["a", "b", "c"]}, "3 tokens, but token_embd.weight has"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"llama.context_length": None}, "no llama.context_length"),
        ({"llama.attention.head_count": 0}, "not a readable GGUF"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    _, keys, tensors = tiny_llama()
    keys = {key: value for key, value in (keys | change).items() if value is not None}
    fails(write_gguf(tmp_path / "m.gguf", keys, tensors), reason)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    _, keys, tensors = tiny_llama()
    tensors["rope_freqs.weight"] = np.ones(8, np.float32)
    fails(write_gguf(tmp_path / "m.gguf", keys, tensors), "rope_freqs.weight has no place")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 this is no GGUF file at all", None])
def test_what_is_not_gguf_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    fails(path, "not a readable GGUF file")


def test_an_existing_folder_is_left_alone(tmp_path: Path, good: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(good)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already exists"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_refused(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(good[: data.draw(st.integers(0, len(good) - 64))])
    fails(path, "m.gguf")


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about numbers the damage made up
def test_a_damaged_header_converts_or_is_refused(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, 20_000))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    number = len(list(tmp_path.iterdir()))
    error = ""
    try:
        folder = convert(path, tmp_path / f"out{number}")
    except ModelError as caught:
        error = str(caught)
    if error:
        assert str(path) in error
        assert len(list(tmp_path.iterdir())) == number
    else:
        assert (folder / "tokenizer.json").is_file()


# --- the embedded model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Path:
    return embedded_model()


def test_embedded_model_answers(embedded: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    model = AutoModelForCausalLM.from_pretrained(embedded)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer(prompt).input_ids)
    ids = tokenizer(f"{prompt}The capital of France is Paris.<|im_end|>", return_tensors="pt").input_ids
    with torch.no_grad():
        greedy = model(ids).logits.argmax(-1)
    assert tokenizer.decode(greedy[0, start - 1 : -1]) == "The capital of France is Paris.<|im_end|>"


def test_embedded_weights_are_exactly_the_dequantised_ones(embedded: Path) -> None:
    (gguf,) = embedded.glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    pairs = {"blk.0.ffn_up": "layers.0.mlp.up_proj", "blk.29.attn_v": "layers.29.self_attn.v_proj"}
    with safe_open(embedded / "model.safetensors", "numpy") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
        assert {one.get_dtype() for one in slices} == {"F32"}
        assert sum(math.prod(one.get_shape()) for one in slices) == catalogue()[0].parameters
        for theirs, ours in pairs.items():
            tensor = tensors[f"{theirs}.weight"]
            expected = dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weights.get_tensor(f"model.{ours}.weight"), expected)


def test_embedded_tokenizer_splits_digits_and_keeps_text(embedded: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    assert tokenizer.tokenize("2024-10") == ["2", "0", "2", "4", "-", "1", "0"]
    for text in CORPUS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
