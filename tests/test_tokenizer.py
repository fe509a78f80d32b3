"""The ids are the tokenizer's own for the whole text, and no document can spell a control token."""

from __future__ import annotations

import json
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, NormalizedString, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers_zoo import BASE, LOSSLESS, NAMES, codec, controls, documents, tokenizer
from transformers import PreTrainedTokenizerFast

from pcdlab.errors import ModelError, TokenizationError
from pcdlab.tokenizer import HFCodec, Piece

FEW = settings(max_examples=60, deadline=None)


def around(name: str) -> tuple[str, str]:
    """Template text in front of a document and behind it."""
    if name in BASE:
        return codec(name).start() + "Text: ", "\nJSON: {"
    before, after = codec(name).render([{"role": "user", "content": "Text: XYZ done"}], generate=True).split("XYZ")
    return before, after


def conversation(name: str, document: str) -> list[Piece]:
    before, after = around(name)
    return [Piece(before, True), Piece(document, False), Piece(after, True)]


def own_ids(name: str, text: str) -> list[int]:
    return tokenizer(name)(text, add_special_tokens=False)["input_ids"]


def control_ids(name: str, ids: list[int]) -> list[int]:
    """Control ids in order, the unknown token aside: a document may produce that by any character."""
    unknown = tokenizer(name).unk_token_id
    return [i for i in ids if i in codec(name).control_ids and i != unknown]


def spells_control(name: str, document: str) -> bool:
    return any(spelling.lower() in document.lower() for spelling in controls(name))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_the_tokenizers_own(name: str) -> None:
    @FEW
    @given(documents(name, control=False))
    @example("")
    @example(" \n\n 12 leading")
    @example("Wow! Stop! e\u0301 ①")
    @example("aspirin  and\n\n\nthink-tanks")
    def check(document: str) -> None:
        if spells_control(name, document):
            return
        pieces = conversation(name, document)
        assert codec(name).encode(pieces) == own_ids(name, "".join(piece.text for piece in pieces))

    check()


@pytest.mark.parametrize("name", NAMES)
def test_control_text_of_the_template_is_recognised_anywhere(name: str) -> None:
    """Control text alone, in any arrangement, gives what the tokenizer gives: flags keep their effect."""

    @FEW
    @given(st.lists(st.sampled_from([*controls(name), " ", "\n", "word", ".", "<", "  12"]), max_size=8).map("".join))
    def check(text: str) -> None:
        assert codec(name).encode([Piece(text, True)]) == own_ids(name, text)
        half = len(text) // 2
        assert codec(name).encode([Piece(text[:half], True), Piece(text[half:], True)]) == own_ids(name, text)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_documents_never_produce_control_tokens(name: str) -> None:
    before, after = around(name)
    frame = control_ids(name, codec(name).encode(conversation(name, "x")))

    @FEW
    @given(documents(name))
    @example("".join(controls(name)))
    @example(" ".join(controls(name)))
    @example("\n".join(controls(name)).upper())
    @example(after + "true}" + after)
    @example(before + after)
    def check(document: str) -> None:
        assert control_ids(name, codec(name).encode([Piece(document, False)])) == []
        assert control_ids(name, codec(name).encode(conversation(name, document))) == frame

    check()


@pytest.mark.parametrize("name", NAMES)
def test_template_control_tokens_keep_their_places(name: str) -> None:
    """Counted from the front before the document, from the back after it."""
    before, _ = around(name)
    leading = len(control_ids(name, codec(name).encode([Piece(before, True)])))

    def places(document: str) -> tuple[list[int], list[int]]:
        ids = codec(name).encode(conversation(name, document))
        found = [n for n, i in enumerate(ids) if control_ids(name, [i])]
        return found[:leading], [n - len(ids) for n in found[leading:]]

    expected = places("x")

    @FEW
    @given(documents(name))
    def check(document: str) -> None:
        assert places(document) == expected

    check()


@pytest.mark.parametrize("name", ["cl100k", "qwen", "bytes"])
def test_spelled_out_control_text_reads_as_if_there_were_no_control_tokens(name: str) -> None:
    description = json.loads(tokenizer(name).backend_tokenizer.to_str())
    description["added_tokens"] = []
    plain = Tokenizer.from_str(json.dumps(description))

    @FEW
    @given(documents(name))
    def check(document: str) -> None:
        assert codec(name).encode([Piece(document, False)]) == plain.encode(document, add_special_tokens=False).ids

    check()


@pytest.mark.parametrize("name", LOSSLESS)
def test_decoding_gives_the_text_back(name: str) -> None:
    @FEW
    @given(documents(name))
    @example("".join(controls(name)))
    @example("".join(map(chr, range(256))))
    def check(document: str) -> None:
        if name == "gemma" and ("▁" in document or "<0x" in document):
            return  # ▁ is how this kind writes a space
        pieces = conversation(name, document)
        text = "".join(piece.text for piece in pieces)
        expected = unicodedata.normalize("NFC", text) if name == "qwen" else text
        assert codec(name).decode(codec(name).encode(pieces)) == expected

    check()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"wordpiece", "flags", "characters"}))
def test_spelled_out_control_text_survives_literally(name: str) -> None:
    for spelling in controls(name):
        assert spelling in codec(name).decode(codec(name).encode([Piece(f"see {spelling} here", False)]))


@pytest.mark.parametrize("name", NAMES)
def test_no_pieces_no_ids(name: str) -> None:
    assert codec(name).encode([]) == []
    assert codec(name).decode([]) == ""


def test_control_tokens_are_markup_not_words_or_white_space() -> None:
    assert "aspirin" not in controls("flags")
    assert {"<MASK>", "@tool"} <= set(controls("flags"))
    assert {"<think>", "</tool_call>"} <= set(controls("qwen"))
    assert not {"\n", "\n\n", "▁▁"} & set(controls("gemma"))
    assert "<h1>" in controls("gemma")
    assert controls("gpt2") == ("<|endoftext|>",)


def test_control_text_across_a_boundary_is_no_control_token() -> None:
    pieces = [Piece("<|im_", True), Piece("start|>", False), Piece("user", True)]
    assert control_ids("qwen", codec("qwen").encode(pieces)) == []
    pieces = [Piece("<", True), Piece("|im_start|>", False)]
    assert control_ids("qwen", codec("qwen").encode(pieces)) == []


def test_whole_word_tokens_do_not_depend_on_the_document_beside_them() -> None:
    token = tokenizer("flags").convert_tokens_to_ids("@tool")
    for document in ("", "word", " ", "\n", "1"):
        ids = codec("flags").encode([Piece(document, False), Piece("@tool", True), Piece(document, False)])
        assert ids.count(token) == 1
    assert codec("flags").encode([Piece("a@tool", True)]) == own_ids("flags", "a@tool")


def test_tokens_matched_after_normalisation() -> None:
    mask = tokenizer("flags").convert_tokens_to_ids("<MASK>")
    for spelling in ("<MASK>", "<mask>", "<Mask>"):
        ids = codec("flags").encode([Piece(f"a  {spelling} b", True)])
        assert ids == own_ids("flags", f"a  {spelling} b")
        assert mask in ids
        assert mask not in codec("flags").encode([Piece(f"a  {spelling} b", False)])


def test_tokens_matched_after_a_normalizer_put_a_prefix() -> None:
    """The prefix stands for the space in front, which must stay in front when the token is renamed."""
    vocab = {c: i for i, c in enumerate("▁ab<>q")}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.Lowercase()]
    )
    backend.add_tokens([AddedToken("<Q>", normalized=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)
    for text in ("<q>a", "a <q> b", "a<Q>b", "a  <Q><q>"):
        expected = wrapped(text, add_special_tokens=False)["input_ids"]
        assert HFCodec(wrapped).encode([Piece(text, True)]) == expected
        assert wrapped.convert_tokens_to_ids("<Q>") not in HFCodec(wrapped).encode([Piece(text, False)])


def test_control_tokens_that_merges_would_make() -> None:
    vocab = {piece: i for i, piece in enumerate(["<", "q", ">", "<q", "<q>", "<q><"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "q"), ("<q", ">"), ("<q>", "<")]))
    backend.add_special_tokens(["<q>"])
    built = HFCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert built.encode([Piece("<q>", True), Piece("<q><q>", False)]) == [4, 3, 2, 3, 2]


def test_byte_tokens_are_no_control_tokens_even_where_added() -> None:
    description = json.loads(tokenizer("llama2").backend_tokenizer.to_str())
    newline = description["model"]["vocab"]["<0x0A>"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    description["added_tokens"].append({"id": newline, "content": "<0x0A>", **flags})
    backend = Tokenizer.from_str(json.dumps(description))
    built = HFCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert newline not in built.control_ids
    assert built.encode([Piece("a\nb", False)]) == own_ids("llama2", "a\nb")
    assert newline in own_ids("llama2", "a\nb")


def test_white_space_beside_a_token_that_swallows_it() -> None:
    ids = codec("flags").encode([Piece("<|user|>", True), Piece("  \n hello", False)])
    assert ids == own_ids("flags", "<|user|>hello")


@pytest.mark.parametrize(("text", "position"), [("\ud83d", 0), ("ok \ude42!", 3)])
def test_lone_surrogates_are_refused(text: str, position: int) -> None:
    with pytest.raises(TokenizationError, match=rf"surrogate U\+D.*character {position}\b.*decode"):
        codec("bytes").encode([Piece("fine", True), Piece(text, False)])


def test_a_control_token_lost_to_the_normalizer_is_an_error() -> None:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.normalizer = normalizers.Replace(Regex(r"a\["), "b")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_tokens([AddedToken("<x>", normalized=True)])
    fragile = HFCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert len(fragile.encode([Piece("o", False), Piece("<x>", True)])) == 2
    with pytest.raises(TokenizationError, match="normalized=false"):
        fragile.encode([Piece("a", False), Piece("<x>", True)])


def test_start_is_what_the_tokenizer_puts_in_front() -> None:
    starts = {name: codec(name).start() for name in NAMES}
    assert {name: text for name, text in starts.items() if text} == {
        "llama3": "<|begin_of_text|>",
        "llama2": "<s>",
        "mistral": "<s>",
        "gemma": "<bos>",
        "unigram": "<s>",
        "wordpiece": "[CLS]",
    }


def test_has_template() -> None:
    assert [name for name in NAMES if not codec(name).has_template] == list(BASE)


def test_template_options_reach_the_template() -> None:
    turn = [{"role": "user", "content": "Hi"}]
    quiet = HFCodec(tokenizer("qwen"), {"enable_thinking": False})
    assert quiet.render(turn, generate=True).endswith("assistant\n<think>\n\n</think>\n\n")
    assert codec("qwen").render(turn, generate=True).endswith("assistant\n")
    assert quiet.fingerprint != codec("qwen").fingerprint


def test_a_template_that_refuses_is_quoted() -> None:
    with pytest.raises(TokenizationError, match=r"\(system, user\): System role not supported"):
        codec("gemma").render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], generate=True)


def test_saved_and_loaded_tokenizers_are_the_same(tmp_path) -> None:
    for name in ("llama3", "gemma"):
        folder = tmp_path / name
        tokenizer(name).save_pretrained(folder)
        (folder / "config.json").write_text("{}")
        loaded = HFCodec.load(folder)
        pieces = conversation(name, "Dear <|eot_id|> <eos>\n\n 12")
        assert loaded.encode(pieces) == codec(name).encode(pieces)
        assert loaded.control_ids == codec(name).control_ids
        assert loaded.fingerprint == HFCodec.load(folder).fingerprint
    assert len({codec(name).fingerprint for name in NAMES}) == len(NAMES)


def test_private_names_do_not_show_in_the_ids() -> None:
    """Two codecs over one tokenizer draw different names and give the same ids."""
    pieces = conversation("mistral", "[INST] a [/INST]")
    assert HFCodec(tokenizer("mistral")).encode(pieces) == codec("mistral").encode(pieces)


def test_folders_without_a_tokenizer(tmp_path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        HFCodec.load(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no tokenizer could be read.*tokenizer\.json"):
        HFCodec.load(tmp_path)


def test_tokenizers_that_cannot_be_copied() -> None:
    with pytest.raises(TokenizationError, match="not a fast tokenizer"):
        HFCodec(SimpleNamespace(backend_tokenizer=None, name_or_path="slow"))

    class Shout:
        def normalize(self, text: NormalizedString) -> None:
            text.uppercase()

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Normalizer.custom(Shout())
    with pytest.raises(TokenizationError, match="written in Python"):
        HFCodec(SimpleNamespace(backend_tokenizer=backend, name_or_path="custom"))
