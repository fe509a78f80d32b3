"""llama.cpp's grammar sampler against llguidance: two libraries, one grammar, the same greedy object."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from embedded import embedded_model

pytest.importorskip("llama_cpp")

from pcdlab.backends.llamacpp import LlamaCppBackend
from pcdlab.backends.llamacpp_codec import GGUFCodec
from pcdlab.backends.llamacpp_library import Model, llama_cpp
from pcdlab.baselines.gbnf import GBNFGenerator, _apply, gbnf
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import generate, judge
from pcdlab.baselines.same_answers import decide_after
from pcdlab.engine import Engine
from pcdlab.errors import BackendError
from pcdlab.gguf_files import find_gguf
from pcdlab.schema import Field, Schema

DOCUMENT = "My parcel is late, and you charged me twice!"
SCHEMA = Schema(
    (
        Field("topic", ("billing", "delivery", "quality", None)),
        Field("version", ("1.0",)),
        Field("urgent", (True, False)),
        Field("answer", ('say "no"\\', "größer 🙂 {}", "\b\f\\b", "none")),
    )
)


@cache
def loaded() -> tuple[Engine, Model, Any]:
    embedded_model()
    model = Model(find_gguf("smollm2-135m"))
    engine = Engine(LlamaCppBackend(model, threads=1), GGUFCodec(model.path))
    return engine, model, engine.compile(SCHEMA)


def generator(cells: int = 1024) -> GBNFGenerator:
    return GBNFGenerator(loaded()[1], threads=1, cells=cells)


def test_both_libraries_write_the_same_object() -> None:
    engine, _, compiled = loaded()
    ids = compiled.prompt.ids(DOCUMENT)
    matcher = grammar_matcher(compiled, grammar_tokenizer(engine.codec, engine.backend.vocabulary))
    ours = [step.token for step in generate(engine.backend, None, ids, grammar_lines(matcher, False))]
    theirs = generator()
    theirs.feed(ids)
    written = theirs.write(gbnf(compiled))
    assert engine.codec.decode(written) == engine.codec.decode(ours)
    assert judge(compiled.prompt.opening + engine.codec.decode(written), SCHEMA).valid
    assert (theirs.passes, theirs.tokens) == (1 + len(written), len(ids) + len(written))
    # Once more behind a part of the prompt that is still there.
    theirs.keep(20)
    assert theirs.length == 20
    theirs.feed(ids[20:])
    assert theirs.write(gbnf(compiled)) == written


def test_the_grammars_own_tokens_are_the_walk_under_this_codec_too() -> None:
    engine, _, compiled = loaded()
    ids = compiled.prompt.ids(DOCUMENT)
    matcher = grammar_matcher(compiled, grammar_tokenizer(engine.codec, engine.backend.vocabulary))
    rule = own_tokens(grammar_lines(matcher, False), compiled)
    tokens = [step.token for step in generate(engine.backend, None, ids, rule, together=True)]
    values = judge(compiled.prompt.opening + engine.codec.decode(tokens), SCHEMA).values
    walked = decide_after(engine.backend, compiled, ids, values)
    assert values == {"version": "1.0", **{name: decision.value for name, decision in walked.items()}}


def test_every_label_can_be_written() -> None:
    """The grammar accepts the lines of all labels, whatever JSON does to their characters."""
    _, model, compiled = loaded()
    grammar = gbnf(compiled).encode()
    for label in range(4):
        tokens = [token for item in compiled for token in item.line(min(label, len(item.field.labels) - 1))]
        sampler = llama_cpp.llama_sampler_init_grammar(model.vocab, grammar, b"root")
        for token in tokens:
            one = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 1.0, 0.0))
            _apply(sampler, one, 1)
            assert one[0].logit == 1.0, token
            llama_cpp.llama_sampler_accept(sampler, token)
        llama_cpp.llama_sampler_free(sampler)


def test_what_llama_cpp_refuses_is_said() -> None:
    with pytest.raises(BackendError, match="refuses the schema's grammar"):
        generator(64).write("root ::= undefined-rule")
    small = generator(256)
    small.feed([1] * 200)
    with pytest.raises(BackendError, match="57 tokens do not fit the 56 cells left"):
        small.feed([1] * 57)
