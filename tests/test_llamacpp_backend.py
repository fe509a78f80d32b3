"""Trees by llama.cpp equal torch and llama.cpp's own plain passes, whatever the cache has been through."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded import embedded_model
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'pcdlab[llamacpp]'")

from test_convert import (
    LLAMA_NAMES,
    bpe_keys,
    gguf_tensors,
    numpy_state,
    tiny_llama,
    trained_bpe,
    write_gguf,
)
from transformers import Olmo3Config, Olmo3ForCausalLM

from pcdlab import models
from pcdlab.backends import llamacpp
from pcdlab.backends.llamacpp import LlamaCppBackend, load
from pcdlab.backends.llamacpp_library import Model
from pcdlab.backends.torch import TorchBackend
from pcdlab.engine import Engine
from pcdlab.errors import BackendError, ModelError, NumericsError, ParameterError
from pcdlab.heads import HeadCache
from pcdlab.schema import Schema
from pcdlab.tokentree import TokenTree, TreeBuilder, join

VOCABULARY = 300
ATOL = 1e-4  # float32: one order of summation against another; 3e-5 is the most seen


def olmo3() -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """A random model with sliding windows of 8 tokens in three of four layers."""
    # Gemma's would do as well, but llama.cpp takes their GELU from a table of float16 values: no better than 1e-3.
    keys = {
        "general.architecture": "olmo2",  # llama.cpp's name for both
        "olmo2.block_count": 4,
        "olmo2.context_length": 512,
        "olmo2.embedding_length": 32,
        "olmo2.feed_forward_length": 48,
        "olmo2.attention.head_count": 4,
        "olmo2.attention.head_count_kv": 2,
        "olmo2.attention.layer_norm_rms_epsilon": 1e-6,
        "olmo2.attention.sliding_window": 8,
        "olmo2.rope.freq_base": 500_000.0,
        **bpe_keys(trained_bpe()),
    }
    config = Olmo3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        rms_norm_eps=1e-6,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=0,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = Olmo3ForCausalLM(config).eval()
    return model, keys, gguf_tensors(numpy_state(model), OLMO3_NAMES, tied=False)


OLMO3_NAMES = LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
KINDS: dict[str, Callable[[], Any]] = {"llama": tiny_llama, "olmo3": olmo3}


@pytest.fixture(scope="session", autouse=True)
def _files(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER.append(tmp_path_factory.mktemp("gguf"))


FOLDER: list[Path] = []


@cache
def file(kind: str) -> Path:
    _, keys, tensors = KINDS[kind]()
    return write_gguf(FOLDER[0] / f"{kind}.gguf", keys, tensors)


def fresh(kind: str = "llama", **options: Any) -> LlamaCppBackend:
    return LlamaCppBackend(Model(file(kind)), kind, "float32", threads=1, **options)


@cache
def backend(kind: str = "llama") -> LlamaCppBackend:
    return fresh(kind)


@cache
def reference(kind: str = "llama") -> TorchBackend:
    return TorchBackend(KINDS[kind]()[0], name=kind)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def random_tree(seed: int, trunk: int, branches: int, everything: bool = True) -> TokenTree:
    """A trunk with branching twigs below it; every node read, in full or for two tokens."""
    rng = np.random.default_rng(seed)
    builder = TreeBuilder()
    end = builder.extend(-1, rng.integers(3, VOCABULARY, trunk).tolist())
    nodes = [end]
    for _ in range(branches):
        nodes.append(builder.extend(int(rng.choice(nodes)), rng.integers(3, VOCABULARY, rng.integers(1, 5)).tolist()))
    for node in range(len(builder.tokens)):
        builder.read(node, range(VOCABULARY) if everything else (5, 6))
    return builder.build()


def by_torch(kind: str, head: list[int], tree: TokenTree) -> np.ndarray:
    torch_backend = reference(kind)
    return torch_backend.read(torch_backend.prefill(head) if head else None, tree).log_probs


def plainly(model: LlamaCppBackend, head: list[int], tree: TokenTree) -> np.ndarray:
    """One plain pass per root-to-leaf path, no prefix and no tree."""
    inner = set(tree.parents.tolist())
    after: dict[int, np.ndarray] = {}
    for leaf in set(range(len(tree))) - inner:
        path = tree.path(leaf)
        logits = model.stream(None).feed([*head, *tree.tokens[path].tolist()])[len(head) :].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        after.update(zip(path, log_probs, strict=True))
    return np.concatenate([after[node][tree.read(i)] for i, node in enumerate(tree.read_nodes.tolist())])


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the order of summation, which depends on the cells that tokens lie in."""
    np.testing.assert_allclose(got, expected, atol=ATOL, rtol=0)


# --- trees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_equals_torch_and_plain_passes(kind: str) -> None:
    head, tree = tokens(1, 23), random_tree(2, trunk=12, branches=9)
    got = backend(kind).read(backend(kind).prefill(head), tree).log_probs
    np.testing.assert_allclose(got, by_torch(kind, head, tree), atol=ATOL, rtol=0)
    np.testing.assert_allclose(got, plainly(backend(kind), head, tree), atol=ATOL, rtol=0)


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(0, 14), st.sampled_from(sorted(KINDS)))
@settings(max_examples=25, deadline=None)
def test_any_tree_equals_torch(seed: int, trunk: int, branches: int, kind: str) -> None:
    head, tree = tokens(seed, seed % 17), random_tree(seed, trunk + (branches == 0), branches)
    prefix = backend(kind).prefill(head) if head else None
    got = backend(kind).read(prefix, tree).log_probs
    np.testing.assert_allclose(got, by_torch(kind, head, tree), atol=ATOL, rtol=0)


def test_float16_state_is_close_and_no_less_equal_to_plain_passes() -> None:
    model = LlamaCppBackend.load(file("llama"))
    assert (model.dtype, model.name, model.layout, model.model) == ("F32", "llamacpp", "packed", "llama")
    head, tree = tokens(1, 23), random_tree(2, trunk=12, branches=9)
    got = model.read(model.prefill(head), tree).log_probs
    np.testing.assert_allclose(got, by_torch("llama", head, tree), atol=0.05, rtol=0)
    np.testing.assert_allclose(got, plainly(model, head, tree), atol=0.02, rtol=0)


def test_a_pass_is_counted_once_and_by_its_tokens() -> None:
    model = fresh()
    tree = random_tree(15, trunk=4, branches=30)
    model.read(model.prefill([3, 4, 5]), tree)
    assert (model.meter.forward_passes, model.meter.tokens_fed) == (2, 3 + len(tree))
    model.read(None, tree)  # trunk and branches together
    assert (model.meter.forward_passes, model.meter.tokens_fed) == (3, 3 + 2 * len(tree))


def test_an_empty_tree() -> None:
    assert backend().read(None, TreeBuilder().build()).log_probs.shape == (0,)


def test_many_documents() -> None:
    branches = random_tree(9, trunk=2, branches=12, everything=False)
    trunks = [tokens(i, n) for i, n in enumerate((3, 60, 1, 40))]
    trunks.append(trunks[0])
    tree = join(trunks, [branches] * 5)
    for kind in KINDS:
        got = backend(kind).read(backend(kind).prefill([4, 5, 6]), tree).log_probs
        np.testing.assert_allclose(got, by_torch(kind, [4, 5, 6], tree), atol=ATOL, rtol=0)


# --- more than the library takes at once -----------------------------------------------------------------------------


def wide(leaves: int) -> TokenTree:
    """A trunk with more leaves than there are sequences."""
    builder = TreeBuilder()
    end = builder.extend(-1, tokens(1, 5))
    for i in range(leaves):
        builder.read(builder.extend(end, [3 + i % 290, 3 + i // 290]), (7, 8, 9))
    return builder.build()


def comb(teeth: int) -> TokenTree:
    """A chain with a leaf at every node."""
    builder = TreeBuilder()
    node = -1
    for i in range(teeth):
        builder.read(builder.extend(node, [5]), (7, 8))
        node = builder.extend(node, [3 + i % 290])
        builder.read(node, (9,))
    return builder.build()


def bushy(seed: int, nodes: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    builder = TreeBuilder()
    for _ in range(nodes):
        at = builder.extend(int(rng.integers(-1, len(builder.tokens))), [int(rng.integers(3, VOCABULARY))])
        builder.read(at, (7, 8))
    return builder.build()


LARGE = {"wide": wide(700), "comb": comb(280), "bushy": bushy(0, 900), "two": join([[3], [4]], [wide(300)] * 2)}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (kind, shape) for kind in KINDS for shape in LARGE if (kind, shape) != ("llama", "comb")
    ],  # too short for a long comb
)
def test_more_leaves_than_sequences(kind: str, shape: str) -> None:
    tree, model = LARGE[shape], fresh(kind)
    got = model.read(model.prefill([4, 5, 6]), tree)
    np.testing.assert_allclose(got.log_probs, by_torch(kind, [4, 5, 6], tree), atol=ATOL, rtol=0)
    assert model.meter.forward_passes > 2
    assert model.meter.tokens_fed == 3 + len(tree)
    assert len(model._free) == 255


@given(
    seed=st.integers(0, 10_000), batch=st.integers(1, 40), rows=st.integers(1, 9), kind=st.sampled_from(sorted(KINDS))
)
@settings(max_examples=25, deadline=None)
def test_small_limits(seed: int, batch: int, rows: int, kind: str) -> None:
    model = backend(kind)
    tree = bushy(seed, 60) if seed % 2 else random_tree(seed, seed % 30 + 1, 10, everything=False)
    keep = tree.trunk // 2
    before = model._batch, model._rows
    model._batch, model._rows = batch, lambda: rows  # type: ignore[method-assign]
    try:
        head = tokens(seed, 12)
        got = model.read(model.prefill(head), tree, keep)
        logits = model.stream(None).feed(head)
    finally:
        model._batch, model._rows = before  # type: ignore[method-assign]
    np.testing.assert_allclose(got.log_probs, by_torch(kind, head, tree), atol=ATOL, rtol=0)
    np.testing.assert_allclose(logits, reference(kind).plain_logits(head), atol=10 * ATOL, rtol=0)
    if keep:
        follow = random_tree(1, trunk=1, branches=3, everything=False)
        again = model.read(got.prefix, follow).log_probs
        path = [*head, *tree.tokens[:keep].tolist()]
        np.testing.assert_allclose(again, by_torch(kind, path, follow), atol=ATOL, rtol=0)


def test_the_cache_grows_and_keeps_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("olmo3", cells=256)
    assert model._cells == 256
    head, tree = tokens(1, 200), random_tree(2, trunk=9, branches=4, everything=False)
    prefix, other = model.prefill(head), model.prefill(tokens(2, 30))
    expected = [model.read(p, tree).log_probs for p in (prefix, other)]
    init = llamacpp.llama_cpp.llama_init_from_model
    no_room = lambda pointer, params: init(pointer, params) if params.n_ctx == 256 else None  # noqa: E731
    monkeypatch.setattr(llamacpp.llama_cpp, "llama_init_from_model", no_room)
    with pytest.raises(BackendError, match="no room for 512 tokens of context"):
        model.prefill(tokens(3, 200), prefix)
    monkeypatch.undo()
    same(model.read(prefix, tree).log_probs, expected[0])
    longer = model.prefill(tokens(3, 200), prefix)
    assert model._cells >= 400
    for p, before in zip((prefix, other), expected, strict=True):
        same(model.read(p, tree).log_probs, before)
    got = model.read(longer, tree).log_probs
    np.testing.assert_allclose(got, by_torch("olmo3", [*head, *tokens(3, 200)], tree), atol=ATOL, rtol=0)


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_grow_in_any_number_of_steps_and_never_change(kind: str) -> None:
    model = backend(kind)
    head, tree = tokens(10, 30), random_tree(11, trunk=4, branches=5)
    first = model.prefill(head[:11])
    before = model.read(first, tree).log_probs
    second = model.prefill(head[11:12], first)
    third = model.prefill(head[12:], second)
    assert (first.length, second.length, third.length) == (11, 12, 30)
    one_shot = model.read(model.prefill(head), tree).log_probs
    same(model.read(third, tree).log_probs, one_shot)
    same(model.read(first, tree).log_probs, before)
    kept = model.read(first, tree, keep=3).prefix
    assert kept.length == 14
    follow = random_tree(12, trunk=1, branches=2)
    path = [*head[:11], *tree.tokens[:3].tolist()]
    np.testing.assert_allclose(model.read(kept, follow).log_probs, by_torch(kind, path, follow), atol=ATOL, rtol=0)
    alone = model.read(None, tree, keep=4).prefix
    got = model.read(alone, follow).log_probs
    np.testing.assert_allclose(got, by_torch(kind, tree.tokens[:4].tolist(), follow), atol=ATOL, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_outlive_what_happens_to_others(kind: str) -> None:
    """More families than fit side by side, and more prefixes of one family than there are sequences."""
    model = fresh(kind)
    tree = random_tree(3, trunk=2, branches=3, everything=False)
    families = [model.prefill(tokens(i, 20)) for i in range(5)]
    expected = [model.read(prefix, tree).log_probs for prefix in families]
    relatives = [model.prefill([3 + i % 290, 3 + i // 290], families[0]) for i in range(300)]
    for i in (0, 150, 299):
        path = [*tokens(0, 20), 3 + i % 290, 3 + i // 290]
        got = model.read(relatives[i], tree).log_probs
        np.testing.assert_allclose(got, by_torch(kind, path, tree), atol=ATOL, rtol=0)
    for prefix, before in zip(families, expected, strict=True):
        same(model.read(prefix, tree).log_probs, before)
    families[0], wide_tree = relatives[7], wide(600)
    del relatives
    gc.collect()
    got = model.read(families[0], wide_tree).log_probs
    path = [*tokens(0, 20), 10, 3]
    np.testing.assert_allclose(got, by_torch(kind, path, wide_tree), atol=ATOL, rtol=0)
    assert len(model._resident) == 1
    assert len(model._free) == 255


def test_dropped_prefixes_free_their_cells() -> None:
    model = fresh("olmo3", cells=256)
    for i in range(10):
        model.prefill(tokens(i, 100))
    assert model._cells == 256
    assert len(model._resident) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_survive_the_disk(kind: str, tmp_path: Path) -> None:
    model, path = fresh(kind), tmp_path / "prefix.safetensors"
    prefix = model.prefill([9, 8, 7], model.prefill(tokens(1, 20)))
    tree = random_tree(16, trunk=3, branches=3)
    expected = model.read(prefix, tree).log_probs
    model.save(prefix, path)
    assert model.fingerprint == fresh(kind).fingerprint
    loaded = fresh(kind).load_prefix(path)
    assert (loaded.length, loaded.nbytes) == (prefix.length, prefix.nbytes)
    same(loaded._backend.read(loaded, tree).log_probs, expected)
    again = model.load_prefix(path)
    same(model.read(again, tree).log_probs, expected)


def test_damaged_files_are_errors_and_harm_nothing(tmp_path: Path) -> None:
    model, path = fresh(), tmp_path / "prefix.safetensors"
    prefix = model.prefill(tokens(1, 20))
    tree = random_tree(16, trunk=3, branches=3)
    expected = model.read(prefix, tree).log_probs
    model.save(prefix, path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:50], whole[:-9], whole[:600] + bytes(len(whole) - 600)):
        path.write_bytes(damaged)
        with pytest.raises(BackendError):
            model.load_prefix(path)
    with pytest.raises(BackendError):
        fresh("olmo3").load_prefix(_saved(model, prefix, tmp_path))
    same(model.read(prefix, tree).log_probs, expected)
    heads = HeadCache(model, tmp_path)
    heads.put([1, 2], prefix)
    (kept,) = tmp_path.glob("????????????????????????????????????????.safetensors")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert HeadCache(model, tmp_path).get([1, 2]) is None


def _saved(model: LlamaCppBackend, prefix: Any, folder: Path) -> Path:
    model.save(prefix, folder / "whole.safetensors")
    return folder / "whole.safetensors"


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stream_feeds_and_rolls_back(kind: str) -> None:
    model, text = backend(kind), tokens(13, 90)
    expected = reference(kind).plain_logits(text)
    stream = model.stream(model.prefill(text[:5]))
    got = [stream.feed(text[5:6]), stream.feed(text[6:20])]
    np.testing.assert_allclose(stream.feed(text[20:23], last=True), expected[22:23], atol=10 * ATOL, rtol=0)
    stream.rollback(3)
    assert stream.length == 20
    got += [stream.feed([token]) for token in text[20:]]
    np.testing.assert_allclose(np.concatenate(got), expected[5:], atol=10 * ATOL, rtol=0)
    stream.rollback(70)  # far behind a sliding window
    np.testing.assert_allclose(stream.feed(text[20:]), expected[20:], atol=10 * ATOL, rtol=0)
    stream.rollback(85)
    np.testing.assert_allclose(stream.feed(text[5:9]), expected[5:9], atol=10 * ATOL, rtol=0)
    with pytest.raises(ParameterError, match="only 4 tokens"):
        stream.rollback(5)


def test_a_stream_comes_back_to_where_its_window_has_gone() -> None:
    """llama.cpp gives cells behind a sliding window to others; a stream that is rolled back behind it needs them again."""
    model, text = fresh("olmo3"), tokens(1, 230)
    head = model.prefill(text[:10])
    hole = model.prefill(tokens(2, 50), head)
    stream = model.stream(head)
    stream.feed(text[10:])
    del hole
    gc.collect()
    model.read(head, random_tree(3, trunk=30, branches=40, everything=False))
    passes = model.meter.forward_passes
    stream.rollback(150)
    assert model.meter.forward_passes == passes + 1
    expected = reference("olmo3").plain_logits(text)[80:]
    np.testing.assert_allclose(stream.feed(text[80:]), expected, atol=10 * ATOL, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_beside_each_other_and_beside_trees(kind: str) -> None:
    model, tree = fresh(kind, cells=256), random_tree(3, trunk=20, branches=12, everything=False)
    texts = [tokens(i, 60) for i in range(3)]
    streams = [model.stream(model.prefill(text[:20])) for text in texts] + [model.stream(None)]
    texts.append(tokens(4, 60))
    starts = [20, 20, 20, 0]
    got: list[list[np.ndarray]] = [[], [], [], []]
    for at in range(0, 40, 5):
        for i, stream in enumerate(streams):
            got[i].append(stream.feed(texts[i][starts[i] + at : starts[i] + at + 5]))
            if at % 10 == 5:
                stream.rollback(2)
                stream.feed([7])
                stream.rollback(1)
                stream.feed(texts[i][starts[i] + at + 3 : starts[i] + at + 5])
        model.read(None, tree)
    for i in range(4):
        expected = reference(kind).plain_logits(texts[i][: starts[i] + 40])[starts[i] :]
        np.testing.assert_allclose(np.concatenate(got[i]), expected, atol=10 * ATOL, rtol=0)


# --- what cannot be done -----------------------------------------------------------------------------------------------


def test_too_long_and_bad_arguments() -> None:
    model = backend()
    with pytest.raises(BackendError, match="129 tokens do not fit 'llama', whose positions end at 128"):
        model.prefill([3] * 129)
    with pytest.raises(BackendError, match="130 tokens do not fit"):
        model.read(model.prefill([3] * 100), random_tree(1, trunk=30, branches=0))
    with pytest.raises(ParameterError, match="keep=99"):
        model.read(None, random_tree(18, trunk=4, branches=2), keep=99)
    with pytest.raises(ParameterError, match="at least one token"):
        model.prefill([])
    with pytest.raises(ParameterError, match="another backend"):
        model.read(backend("olmo3").prefill([3]), random_tree(1, 2, 0))
    with pytest.raises(ParameterError, match=r"dtype 'int4' is unknown; choose one of auto, float16, float32"):
        LlamaCppBackend.load(file("llama"), "int4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_leaves_everything_as_it_was(kind: str) -> None:
    model, tree = fresh(kind), random_tree(3, trunk=4, branches=6, everything=False)
    prefix = model.prefill(tokens(1, 20))
    stream = model.stream(prefix)
    stream.feed([5, 6])
    expected = model.read(prefix, tree).log_probs
    free = len(model._free)
    wrong = TokenTree(np.array([3, 99_999]), np.array([-1, 0]), np.array([1]), np.array([5]), np.array([0, 1]))
    for call in (
        lambda: model.prefill([3, 99_999], prefix),
        lambda: model.read(prefix, wrong, keep=1),
        lambda: stream.feed([7, 99_999]),
    ):
        with pytest.raises(BackendError, match=r"could not run .* 99999"):
            call()
    assert len(model._free) == free
    same(model.read(prefix, tree).log_probs, expected)
    np.testing.assert_allclose(
        stream.feed([7]), reference(kind).plain_logits([*tokens(1, 20), 5, 6, 7])[-1:], atol=10 * ATOL, rtol=0
    )


def test_files_that_are_no_models(tmp_path: Path) -> None:
    model, tree = fresh(), random_tree(3, trunk=4, branches=6, everything=False)
    expected = model.read(None, tree).log_probs
    whole = file("llama").read_bytes()
    for content, reason in (
        (b"", r""),
        (b"PK\3\4" + bytes(1000), r"magic"),
        (whole[: len(whole) // 2], r"not within the file bounds"),
        (whole[:2000], r""),
    ):
        (tmp_path / "broken.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=rf"broken\.gguf: llama\.cpp cannot load this file: .*{reason}"):
            load(tmp_path / "broken.gguf")
    same(model.read(None, tree).log_probs, expected)


def test_garbage_logits_are_an_error_not_an_argmax(tmp_path: Path) -> None:
    _, keys, tensors = tiny_llama()
    tensors["output_norm.weight"] = tensors["output_norm.weight"] * np.float32("nan")
    model = LlamaCppBackend.load(write_gguf(tmp_path / "broken.gguf", keys, tensors))
    with pytest.raises(NumericsError, match="'broken' returned NaN"):
        model.read(None, random_tree(17, trunk=3, branches=1))


def test_recurrent_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp.llama_cpp, "llama_model_is_hybrid", lambda model: True)
    with pytest.raises(ModelError, match="recurrent state cannot skip siblings"):
        LlamaCppBackend.load(file("llama"))


def test_loading_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(file("llama").read_bytes())
    monkeypatch.chdir(tmp_path)
    for name, title in (("mine", "mine"), ("mine.gguf", "mine"), ("models/mine.gguf", "mine")):
        model, codec = load(name)
        assert (model.model, model.max_tokens, model.vocabulary) == (title, 128, VOCABULARY)
        assert codec.has_template


# --- the embedded model ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Path:
    return embedded_model()


def test_the_unpacked_embedded_model_equals_torch(embedded: Path) -> None:
    """The whole model in float32, its weights unpacked by llama.cpp here and by pcdlab.convert there."""
    (packed,) = embedded.glob("*.gguf")
    ours, theirs = LlamaCppBackend.load(packed, "float32"), TorchBackend.load(embedded, "float32")
    assert (ours.dtype, ours.model) == ("float32", packed.stem)
    rng = np.random.default_rng(0)
    builder = TreeBuilder()
    end = builder.extend(-1, rng.integers(20, 49_000, 10).tolist())
    for _ in range(6):
        node = builder.extend(end, rng.integers(20, 49_000, 2).tolist())
        builder.read(node, rng.permutation(49_152)[:500].tolist())
    head, tree = rng.integers(20, 49_000, 40).tolist(), builder.build()
    got, expected = (b.read(b.prefill(head), tree).log_probs for b in (ours, theirs))
    np.testing.assert_allclose(got, expected, atol=5e-4, rtol=0)


def test_the_embedded_model_fills_a_schema(embedded: Path) -> None:
    schema = Schema.from_dict(
        {
            "language": {"type": "enum", "choices": ["English", "German", "French"]},
            "is_question": {"type": "boolean"},
        }
    )
    model, codec = load(models.catalogue()[0].alias)
    assert (model.model, model.dtype) == ("smollm2-135m", "Q4_1, unpacked")
    engine = Engine(model, codec)
    out = engine.extract("Good morning. The weather is fine today, and everybody speaks English here.", schema)
    assert out.values["language"] == "English"
    assert (out.backend, out.dtype, out.stats.forward_passes) == ("llamacpp", model.dtype, 2)
    again = engine.extract("Another text, this time a longer one, with the head already in the cache.", schema)
    assert again.stats.forward_passes == 1
    assert again.stats.cached_tokens > 50
    both = engine.extract_many(["First.", "Second of two."], schema, progress=False)
    for text, together in zip(["First.", "Second of two."], both, strict=True):
        alone = engine.extract(text, schema)
        for name in schema.names:
            # Activations are rounded to 8 bits: what differs in the last digit before, may differ in the first behind.
            assert abs(alone.fields[name].probability - together.fields[name].probability) < 0.2
