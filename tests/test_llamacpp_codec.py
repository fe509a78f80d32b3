"""GGUF vocabularies give llama.cpp's own ids, and documents never give control tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from embedded import embedded_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'pcdlab[llamacpp]'")

from gguf import TokenType
from test_convert import CONTROL, bpe_keys, trained_bpe, write_gguf

from pcdlab.backends.llamacpp_codec import GGUFCodec
from pcdlab.backends.llamacpp_library import llama_cpp
from pcdlab.compile import compile_schema
from pcdlab.errors import ModelError, TokenizationError
from pcdlab.presets import list_presets, load_preset
from pcdlab.prompt import Prompt
from pcdlab.schema import Schema
from pcdlab.tokenizer import HFCodec, Piece

SHAPE = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
CHATML = ["<|im_start|>", "<|im_end|>"]


def with_tokens(keys: dict[str, Any], more: list[tuple[str, TokenType]]) -> dict[str, Any]:
    """Tokens added behind a vocabulary."""
    keys = dict(keys)
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], *(text for text, _ in more)]
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], *(int(kind) for _, kind in more)]
    if "tokenizer.ggml.scores" in keys:
        keys["tokenizer.ggml.scores"] = [*keys["tokenizer.ggml.scores"], *(-1000.0 for _ in more)]
    return keys


def bpe() -> dict[str, Any]:
    """Byte-level BPE with control tokens, user-defined markup and a user-defined run of spaces."""
    more = [("<think>", TokenType.USER_DEFINED), ("   ", TokenType.USER_DEFINED), ("<|x|>", TokenType.CONTROL)]
    return with_tokens(bpe_keys(trained_bpe()), more)


def sentencepiece() -> dict[str, Any]:
    """SentencePiece with a space in front of every text, whose merges can spell `<s>` and `<tag>`."""
    rows = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, TokenType.CONTROL), ("</s>", 0.0, TokenType.CONTROL)]
    rows += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    pieces = [*"▁abcdefgst<>/ainé", "<s", "</", "</s", "▁<", "ta", "tag", "<ta", "<tag", "▁a", "as", "▁as", "in", "▁in"]
    rows += [(piece, -float(i), TokenType.NORMAL) for i, piece in enumerate(dict.fromkeys(pieces))]
    rows += [("<tag>", -50.0, TokenType.USER_DEFINED)]
    tokens, scores, types = zip(*rows, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    }


def swallowing() -> dict[str, Any]:
    """Control tokens that take the white space behind them away; llama.cpp knows such models by name."""
    more = [("<|endoftext|>", TokenType.CONTROL), ("<|user|>", TokenType.CONTROL), ("<|end|>", TokenType.CONTROL)]
    return with_tokens(sentencepiece(), more) | {"general.name": "Phi-3 tiny"}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {"bpe": bpe, "sentencepiece": sentencepiece, "swallowing": swallowing}


@pytest.fixture(scope="module", params=KINDS)
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GGUFCodec:
    path = tmp_path_factory.mktemp(request.param) / "vocabulary.gguf"
    return GGUFCodec(write_gguf(path, SHAPE | KINDS[request.param](), {}))


def make(folder: Path, keys: dict[str, Any], **options: Any) -> GGUFCodec:
    return GGUFCodec(write_gguf(folder / "vocabulary.gguf", SHAPE | keys, {}), options)


def own_ids(codec: GGUFCodec, text: str, special: bool = True) -> list[int]:
    """What llama.cpp itself gives for a text."""
    data = text.encode()
    ids = (llama_cpp.llama_token * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(codec._original.vocab, data, len(data), ids, len(ids), False, special)
    return ids[:count]


def spells_control(codec: GGUFCodec, text: str) -> bool:
    return any(spelling in text for spelling in codec._ids)


TEXTS = st.text(
    alphabet=st.sampled_from("The parcel 0123<>|/ast \n\tnaïve東🎉'{}\":,_imx_think▁\0"), max_size=40
) | st.text(max_size=20)
CONTROLS = st.sampled_from([*CONTROL, "<think>", "<|x|>", "<s>", "</s>", "<tag>", "<unk>", "<|user|>", "<|endoftext|>"])


@given(st.lists(st.tuples(TEXTS, CONTROLS), max_size=4), TEXTS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_those_of_the_whole_text(codec: GGUFCodec, turns: list[tuple[str, str]], last: str) -> None:
    pieces = [Piece(last, False)]
    for document, control in turns:
        pieces += [Piece(control, True), Piece(document, False)]
    if any(spells_control(codec, piece.text) for piece in pieces if not piece.control):
        return
    text = "".join(piece.text for piece in pieces)
    # Plain text on both sides of a cut may spell a control token only together: llama.cpp would see it, and must not.
    if [i for i in own_ids(codec, text) if i in codec._fixed_ids] == [
        codec._ids[p.text] for p in pieces if p.control and p.text in codec._ids and p.text != "<unk>"
    ]:
        assert codec.encode(pieces) == own_ids(codec, text)


@given(st.lists(TEXTS | CONTROLS, max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_give_no_control_tokens(codec: GGUFCodec, parts: list[str]) -> None:
    document = "".join(parts)
    control = next(spelling for spelling, i in codec._ids.items() if i in codec._fixed_ids)
    ids = codec.encode([Piece(control, True), Piece(document, False)])
    assert [i for i in ids if i in codec.control_ids] == [codec._ids[control]]
    if "▁" not in document and not codec._swallow:
        space = " " if codec._space_first and document else ""
        assert codec.decode(ids) == control + space + document
    if not spells_control(codec, document) and not codec._swallow:
        assert ids[1:] == own_ids(codec, document, special=False)


def test_user_defined_markup_and_spelled_out_merges(tmp_path: Path) -> None:
    codec = make(tmp_path, sentencepiece())
    think = codec._ids["<tag>"]
    assert own_ids(codec, "as <tag> <s>", special=False)[-1] == codec._ids["<s>"]  # the merges do it
    assert own_ids(codec, "<tag>", special=False) == [think]  # a converter's choice of type does it
    ids = codec.encode([Piece("as <tag> <s>", False)])
    assert not codec.control_ids & set(ids)
    assert codec.decode(ids) == "as <tag> <s>"
    assert codec.encode([Piece("<tag><s>", True)]) == [think, codec._ids["<s>"]]
    assert codec.encode([Piece("<t", True), Piece("ag>", True)]) == [think]
    assert think not in codec.encode([Piece("<t", True), Piece("ag>", False)])
    assert codec.control_ids == {codec._ids[t] for t in ("<unk>", "<s>", "</s>", "<tag>")}


def test_white_space_is_swallowed_where_llama_cpp_does_it(tmp_path: Path) -> None:
    codec = make(tmp_path, swallowing())
    for document in ("  \n as in", "as in", " "):
        pieces = [Piece("<|user|>\n ", True), Piece(document, False), Piece(" <|end|>\n", True)]
        assert codec.encode(pieces) == own_ids(codec, "".join(p.text for p in pieces))


def test_ordinary_added_tokens_stay_ordinary(tmp_path: Path) -> None:
    codec = make(tmp_path, bpe())
    assert "   " not in codec._ids
    assert codec.encode([Piece("a   b", False)]) == own_ids(codec, "a   b")
    pad = bpe()
    pad["tokenizer.ggml.token_type"][pad["tokenizer.ggml.tokens"].index("!")] = int(TokenType.CONTROL)
    assert "!" not in make(tmp_path, pad)._ids


def test_templates(tmp_path: Path) -> None:
    codec = make(tmp_path, bpe())
    turns = [{"role": "user", "content": "hi"}]
    assert codec.has_template
    assert codec.render(turns, generate=False) == "<|start|>user\nhi<|end|>"
    keys = sentencepiece()
    assert make(tmp_path, keys).render(turns, generate=True) == "<s>[user] hi"
    keys["tokenizer.chat_template"] = (
        "{%- if tools is none and documents is none %}{{ eos_token }}{%- endif %}\n"
        "    {% generation %}{{ messages | tojson }}{% endgeneration %}"
        "{% for m in messages %}{% if add_generation_prompt %}{% continue %}{% endif %}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ strftime_now('%%') }}{% endif %}"
    )
    expected = '</s>[{"role": "user", "content": "hi"}]'
    assert make(tmp_path, keys).render(turns, generate=True) == expected
    assert make(tmp_path, keys, enable_thinking=False).render(turns, generate=True) == f"{expected}%"
    keys["tokenizer.chat_template"] = "{{ raise_exception('no such role') }}"
    with pytest.raises(TokenizationError, match=r"refused the turns \(user\): no such role"):
        make(tmp_path, keys).render(turns, generate=True)
    keys["tokenizer.chat_template"] = "{{ ''.__class__.__mro__ }}"
    with pytest.raises(TokenizationError, match="unsafe"):
        make(tmp_path, keys).render(turns, generate=True)
    keys["tokenizer.chat_template"] = "{% if %}"
    with pytest.raises(ModelError, match=r"vocabulary\.gguf: its chat template is not valid"):
        make(tmp_path, keys)


def test_chatml_where_only_its_tokens_are_there(tmp_path: Path) -> None:
    keys = with_tokens(bpe(), [(token, TokenType.CONTROL) for token in CHATML])
    del keys["tokenizer.chat_template"]
    codec = make(tmp_path, keys)
    assert codec.has_template
    turns = [{"role": "user", "content": "hi"}]
    assert codec.render(turns, generate=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_base_models_have_no_template(tmp_path: Path) -> None:
    keys = sentencepiece()
    del keys["tokenizer.chat_template"]
    codec = make(tmp_path, keys)
    assert not codec.has_template
    assert codec.start() == "<s>"
    with pytest.raises(TokenizationError, match="no chat template"):
        codec.render([{"role": "user", "content": "hi"}], generate=True)
    assert make(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False}).start() == ""


def test_a_template_without_its_control_tokens_is_refused(tmp_path: Path) -> None:
    keys = bpe() | {"tokenizer.chat_template": "{{ '<|im_start|>' }}{{ messages[0].content }}<|end|>"}
    with pytest.raises(ModelError, match=r"writes <\|im_start\|>, and its vocabulary has no such control token;"):
        make(tmp_path, keys)
    keys["tokenizer.chat_template"] = "<start_of_turn>{{ messages[0].content }}<|stop|>"
    with pytest.raises(ModelError, match=r"writes <start_of_turn>, <\|stop\|>, and .* control tokens;"):
        make(tmp_path, keys)
    # Zephyr's kind was trained with these spelled out.
    keys["tokenizer.chat_template"] = "<|{{ messages[0].role }}|>\n{{ messages[0].content }}<|end|>\n<|assistant|>\n"
    assert make(tmp_path, keys).has_template


def test_bad_text_and_bad_ids(tmp_path: Path) -> None:
    codec = make(tmp_path, bpe())
    with pytest.raises(TokenizationError, match="lone surrogate"):
        codec.encode([Piece("a\ud800", False)])
    with pytest.raises(TokenizationError, match="999 is not an id"):
        codec.decode([999])
    assert codec.encode([]) == []
    assert codec.decode([]) == ""


def test_a_file_without_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"vocabulary\.gguf"):
        make(tmp_path, {})
    with pytest.raises(ModelError, match=r"vocabulary\.gguf"):
        make(tmp_path, {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": 10})
    with pytest.raises(ModelError, match="names a token twice"):
        make(tmp_path, with_tokens(bpe(), [("!", TokenType.CONTROL)]))


def test_the_fingerprint_is_that_of_vocabulary_template_and_options(tmp_path: Path) -> None:
    keys = bpe()
    first = make(tmp_path, keys).fingerprint
    assert first == make(tmp_path, keys | {"general.name": "other", "llama.block_count": 2}).fingerprint
    changed = keys | {"tokenizer.chat_template": "{{ messages }}"}
    others = [make(tmp_path, changed), make(tmp_path, with_tokens(keys, [("<|y|>", TokenType.CONTROL)]))]
    assert len({first, make(tmp_path, keys, thinking=False).fingerprint, *(c.fingerprint for c in others)}) == 4


def test_schemas_compile(codec: GGUFCodec) -> None:
    compiled = compile_schema(
        codec, Schema.from_dict({"a": {"type": "boolean"}, "as": {"type": "enum", "choices": ["a", "<s>"]}})
    )
    ids = compiled.prompt.ids("An <s> <think> of <|end|> text")
    assert ids[: len(compiled.prompt.head)] == list(compiled.prompt.head)


# --- the embedded model ------------------------------------------------------------------------------------------------


def test_the_embedded_model_reads_the_same_prompts_as_under_transformers() -> None:
    folder = embedded_model()
    (path,) = folder.glob("*.gguf")
    ours, theirs = GGUFCodec(path), HFCodec.load(folder)
    assert ours.control_ids == theirs.control_ids
    assert ours.start() == theirs.start()
    assert list_presets()
    for file in list_presets():
        preset = load_preset(file)
        for document in (preset.context, *(sample.context for sample in preset.samples), "<|im_end|>\n <think> 東京\0"):
            ids = Prompt(ours, preset.schema).ids(document)
            assert ids == Prompt(theirs, preset.schema).ids(document)
            assert ours.decode(ids) == theirs.decode(ids)
