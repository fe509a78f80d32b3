"""Packed equals rows equals plain forward passes, on every architecture at hand."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import SHARED, VOCABULARY, tiny

from pcdlab.backends import torch as torch_backend
from pcdlab.backends import torch_attention, torch_products
from pcdlab.backends.torch import PackedPrefix, TorchBackend
from pcdlab.errors import BackendError, ModelError, NumericsError, ParameterError
from pcdlab.tokentree import TokenTree, TreeBuilder, join, lay_out

PURE_ATTENTION = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mistral", "gpt_oss"]
HYBRID = ["lfm2", "qwen3_next"]
EVERYTHING = np.arange(VOCABULARY)


def random_tree(seed: int, trunk: int, branches: int) -> TokenTree:
    """A trunk with branching twigs below it, every node read in full."""
    rng = np.random.default_rng(seed)
    builder = TreeBuilder()
    end = builder.extend(-1, rng.integers(3, VOCABULARY, trunk).tolist())
    nodes = [end]
    for _ in range(branches):
        nodes.append(builder.extend(int(rng.choice(nodes)), rng.integers(3, VOCABULARY, rng.integers(1, 5)).tolist()))
    for node in range(len(builder.tokens)):
        builder.read(node, EVERYTHING.tolist())
    return builder.build()


def plain(backend: TorchBackend, head: list[int], tree: TokenTree) -> np.ndarray:
    """The reference: one plain forward pass per read."""
    expected = []
    for node in tree.read_nodes:
        logits = backend.plain_logits([*head, *tree.tokens[tree.path(int(node))].tolist()])[-1]
        expected.append(torch.log_softmax(torch.from_numpy(logits), -1).numpy())
    return np.concatenate(expected)


@pytest.mark.parametrize("kind", PURE_ATTENTION)
def test_packed_equals_rows_equals_plain(kind: str) -> None:
    packed, rows = TorchBackend(tiny(kind)), TorchBackend(tiny(kind), layout="rows")
    assert packed.layout == "packed", packed.layout_reason
    head = np.random.default_rng(1).integers(3, VOCABULARY, 23).tolist()
    tree = random_tree(2, trunk=12, branches=9)
    expected = plain(packed, head, tree)
    for backend in (packed, rows):
        got = backend.read(backend.prefill(head), tree).log_probs
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("kind", HYBRID)
def test_hybrids_fall_back_to_rows_and_equal_plain(kind: str) -> None:
    backend = TorchBackend(tiny(kind))
    assert backend.layout == "rows"
    assert "cannot skip siblings" in backend.layout_reason
    head = list(range(3, 20))
    tree = random_tree(3, trunk=6, branches=6)
    got = backend.read(backend.prefill(head), tree, keep=4)
    np.testing.assert_allclose(got.log_probs, plain(backend, head, tree), atol=1e-5)
    again = random_tree(4, trunk=2, branches=2)
    np.testing.assert_allclose(
        backend.read(got.prefix, again).log_probs, plain(backend, [*head, *tree.tokens[:4].tolist()], again), atol=1e-5
    )


def test_absolute_positions_run_packed_too() -> None:
    backend = TorchBackend(tiny("gpt2"))
    tree = random_tree(5, trunk=5, branches=7)
    np.testing.assert_allclose(
        backend.read(backend.prefill([5, 6, 7]), tree).log_probs, plain(backend, [5, 6, 7], tree), atol=1e-5
    )


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(0, 14), st.sampled_from(["llama", "gemma2", "gemma3"]))
@settings(max_examples=25, deadline=None)
def test_any_tree_equals_plain(seed: int, trunk: int, branches: int, kind: str) -> None:
    backend = BACKENDS[kind]
    head = np.random.default_rng(seed).integers(3, VOCABULARY, seed % 17 + 1).tolist()
    tree = random_tree(seed, trunk + (branches == 0), branches)
    np.testing.assert_allclose(
        backend.read(backend.prefill(head), tree).log_probs, plain(backend, head, tree), atol=1e-5
    )


BACKENDS = {kind: TorchBackend(tiny(kind)) for kind in ("llama", "gemma2", "gemma3")}


def test_without_a_prefix() -> None:
    tree = random_tree(7, trunk=9, branches=4)
    got = BACKENDS["llama"].read(None, tree).log_probs
    np.testing.assert_allclose(got, plain(BACKENDS["llama"], [], tree), atol=1e-5)


def test_large_groups_and_many_documents() -> None:
    backend = BACKENDS["gemma3"]
    rng = np.random.default_rng(8)
    trunks = [rng.integers(3, VOCABULARY, n).tolist() for n in (3, 110, 1, 40, 3)]
    trunks.append(trunks[0])
    branches = random_tree(9, trunk=2, branches=30)
    head = [4, 5, 6]
    prefix = backend.prefill(head)
    together = backend.read(prefix, join(trunks, [branches] * len(trunks))).log_probs.reshape(len(trunks), -1)
    for trunk, got in zip(trunks, together, strict=True):
        alone = backend.read(prefix, join([trunk], [branches])).log_probs
        np.testing.assert_allclose(got, alone, atol=1e-5)
    np.testing.assert_allclose(together[1], plain(backend, [*head, *trunks[1]], branches), atol=1e-5)


def documents(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Some that begin alike, some the same, one longer than a window."""
    trunks = [rng.integers(3, VOCABULARY, n).tolist() for n in rng.integers(1, 40, count)]
    return [*trunks, [*trunks[0], 5, 6], trunks[-1][:1], trunks[0]]


@given(st.integers(0, 10_000), st.sampled_from(["llama", "gemma2", "gemma3"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_below_kept_trunks_all_is_as_if_they_ran_again(seed: int, kind: str, bare: bool) -> None:
    backend = BACKENDS[kind]
    rng = np.random.default_rng(seed)
    trunks = documents(rng, int(rng.integers(1, 6)))
    prefix = None if bare else backend.prefill(rng.integers(3, VOCABULARY, seed % 17 + 1).tolist())
    first = join(trunks, [random_tree(seed + i, trunk=1, branches=3) for i in range(len(trunks))])
    kept = backend.read(prefix, first, keep=first.shared)
    np.testing.assert_allclose(kept.log_probs, backend.read(prefix, first).log_probs, atol=1e-5)
    for more in range(2):  # documents that ask for little, for nothing, or for more than a group holds
        sizes = np.append(rng.choice([0, 2, 90], len(trunks) - 1), 2)
        plans = [random_tree(seed + i, 1, n) if n else TreeBuilder().build() for i, n in enumerate(sizes.tolist())]
        then = join(trunks, plans)
        before = backend.meter.tokens_fed
        got = backend.read(kept.prefix, then, keep=then.shared * more)
        assert backend.meter.tokens_fed - before == len(then) - then.shared
        np.testing.assert_allclose(got.log_probs, backend.read(prefix, then).log_probs, atol=1e-5)
        assert (got.prefix is kept.prefix) == bool(more)


def test_what_kept_trunks_cannot_do_is_refused(tmp_path: Path) -> None:
    backend = BACKENDS["llama"]
    trunks = [[3, 4], [5, 6]]
    branches = random_tree(3, trunk=1, branches=2)
    tree = join(trunks, [branches] * 2)
    kept = backend.read(None, tree, keep=tree.shared).prefix
    with pytest.raises(ParameterError, match="does not begin with the 4 nodes"):
        backend.read(kept, join([[3, 4], [5, 7]], [branches] * 2))
    with pytest.raises(ParameterError, match="keep=1 "):
        backend.read(kept, tree, keep=1)
    at_the_end = replace(tree, read_nodes=np.array([1, *tree.read_nodes[1:]]))
    with pytest.raises(ParameterError, match="a read sits at node 1"):
        backend.read(kept, at_the_end)
    nothing = join(trunks, [TreeBuilder().build()] * 2)
    with pytest.raises(ParameterError, match=r"no node that this pass would run \(4 of its 4"):
        backend.read(kept, nothing)
    with pytest.raises(ParameterError, match=r"no node that this pass would run \(0 of its 0"):
        backend.read(None, TreeBuilder().build())
    path = tmp_path / "prefix.safetensors"
    with pytest.raises(ParameterError, match="stream takes one run of tokens"):
        backend.stream(kept)
    with pytest.raises(ParameterError, match="prefill takes one run of tokens"):
        backend.prefill([3], kept)
    with pytest.raises(ParameterError, match="save takes one run of tokens"):
        backend.save(kept, path)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_prefixes_grow_in_any_number_of_steps_and_never_change(kind: str) -> None:
    backend = BACKENDS[kind]
    tokens = np.random.default_rng(10).integers(3, VOCABULARY, 30).tolist()
    tree = random_tree(11, trunk=4, branches=5)
    first = backend.prefill(tokens[:11])
    before = backend.read(first, tree).log_probs
    second = backend.prefill(tokens[11:12], first)
    third = backend.prefill(tokens[12:], second)
    assert (first.length, second.length, third.length) == (11, 12, 30)
    one_shot = backend.read(backend.prefill(tokens), tree).log_probs
    np.testing.assert_allclose(backend.read(third, tree).log_probs, one_shot, atol=1e-5)
    np.testing.assert_array_equal(backend.read(first, tree).log_probs, before)
    kept = backend.read(first, tree, keep=3).prefix
    follow = random_tree(12, trunk=1, branches=2)
    np.testing.assert_allclose(
        backend.read(kept, follow).log_probs,
        plain(backend, [*tokens[:11], *tree.tokens[:3].tolist()], follow),
        atol=1e-5,
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_stream_feeds_and_rolls_back(kind: str) -> None:
    backend = TorchBackend(tiny(kind))
    tokens = np.random.default_rng(13).integers(3, VOCABULARY, 90).tolist()
    expected = backend.plain_logits(tokens)
    stream = backend.stream(backend.prefill(tokens[:5]))
    got = [stream.feed(tokens[5:6]), stream.feed(tokens[6:20])]
    np.testing.assert_allclose(stream.feed(tokens[20:23], last=True), expected[22:23], atol=1e-4)
    stream.rollback(3)
    assert stream.length == 20
    got += [stream.feed([token]) for token in tokens[20:]]
    np.testing.assert_allclose(np.concatenate(got), expected[5:], atol=1e-4)
    assert stream.feed([]).shape == (0, VOCABULARY)
    with pytest.raises(ParameterError, match="only 85 tokens"):
        stream.rollback(86)


def test_the_matrix_kernel_equals_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulation for devices without the CPU kernel, on the same passes."""
    tree = random_tree(14, trunk=12, branches=9)
    flash = BACKENDS["gemma3"].read(BACKENDS["gemma3"].prefill([3, 4, 5, 6]), tree).log_probs

    def no_flash(q, k, v, scale, mask, softcap, original=torch_attention.attend):  # type: ignore[no-untyped-def]
        return original(q, k, v, scale, mask, 1e6)  # a cap this high changes nothing but the code path

    monkeypatch.setattr(torch_attention, "attend", no_flash)
    matrix = BACKENDS["gemma3"].read(BACKENDS["gemma3"].prefill([3, 4, 5, 6]), tree).log_probs
    np.testing.assert_allclose(matrix, flash, atol=1e-5)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every pass that may takes the way through matrix products, in small blocks; rows of each layer that did."""
    rows: list[int] = []

    def noted(blocks, q, k, v, prefix, scale):  # type: ignore[no-untyped-def]
        rows.append(q.shape[2])
        assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
        assert blocks[-1].stop == q.shape[2]
        return torch_products.attend_blocks(blocks, q, k, v, prefix, scale)

    monkeypatch.setattr(torch_attention, "fast_products", lambda device, dtype: True)
    monkeypatch.setattr(torch_attention, "attend_blocks", noted)
    monkeypatch.setattr(torch_attention, "FEWEST", 1)
    monkeypatch.setattr(torch_products, "ROWS", 17)
    monkeypatch.setattr(torch_backend, "lay_out", lambda tree, group_size=9: lay_out(tree, group_size))
    return rows


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 40), st.integers(0, 30))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_equal_plain(products: list[int], seed: int, trunk: int, branches: int, length: int) -> None:
    backend = BACKENDS["llama"]
    head = np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()
    tree = random_tree(seed, trunk, branches)
    products.clear()
    got = backend.read(backend.prefill(head) if head else None, tree).log_probs
    np.testing.assert_allclose(got, plain(backend, head, tree), atol=1e-5)
    assert products.count(len(tree)) >= 3  # a layer each


@given(st.integers(0, 10_000), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_products_below_kept_trunks(products: list[int], seed: int, bare: bool, large: bool) -> None:
    backend = BACKENDS["llama"]
    rng = np.random.default_rng(seed)
    trunks = documents(rng, int(rng.integers(1, 6)))
    head = rng.integers(3, VOCABULARY, seed % 17 + 1).tolist()
    prefix = None if bare else backend.prefill(head)
    sizes = rng.choice([0, 2, 30 if large else 1], (2, len(trunks)))
    sizes[:, -1] = 2
    first, then = (
        join(trunks, [random_tree(seed + i, 1, n) if n else TreeBuilder().build() for i, n in enumerate(some)])
        for some in sizes.tolist()
    )
    kept = backend.read(prefix, first, keep=first.shared)
    products.clear()
    got = backend.read(kept.prefix, then).log_probs
    assert products == [len(then) - then.shared] * 3
    expected = [
        plain(backend, [*([] if bare else head), *trunk], random_tree(seed + i, 1, n))
        for i, (trunk, n) in enumerate(zip(trunks, sizes[1].tolist(), strict=True))
        if n
    ]
    np.testing.assert_allclose(got, np.concatenate(expected), atol=1e-5)


@pytest.mark.parametrize("kind", PURE_ATTENTION)
def test_products_leave_windows_caps_and_sinks_alone(products: list[int], kind: str) -> None:
    backend = TorchBackend(tiny(kind))
    assert backend.layout == "packed", backend.layout_reason
    products.clear()
    head = np.random.default_rng(1).integers(3, VOCABULARY, 23).tolist()
    tree = random_tree(2, trunk=12, branches=9)
    got = backend.read(backend.prefill(head), tree).log_probs
    np.testing.assert_allclose(got, plain(backend, head, tree), atol=1e-5)
    layers = {"gemma2": 0, "gpt_oss": 0, "mistral": 0, "gemma3": 1}.get(kind, 3)
    assert products.count(len(tree)) == layers


def test_products_in_bfloat16_are_close(products: list[int]) -> None:
    backend = TorchBackend(copy.deepcopy(tiny("llama")).bfloat16())
    assert backend.layout == "packed", backend.layout_reason  # which its probe has compared
    assert products


def test_a_single_token_takes_the_fused_kernel(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "FEWEST", 2)
    stream = BACKENDS["llama"].stream(BACKENDS["llama"].prefill([3, 4, 5]))
    products.clear()
    stream.feed([6])
    assert not products


def test_a_pass_is_counted_once_and_by_its_tokens() -> None:
    backend = TorchBackend(tiny("llama"))
    prefix = backend.prefill([3, 4, 5])
    tree = random_tree(15, trunk=4, branches=3)
    backend.read(prefix, tree)
    assert (backend.meter.forward_passes, backend.meter.tokens_fed) == (2, 3 + len(tree))


def test_prefixes_survive_the_disk(tmp_path: Path) -> None:
    backend = BACKENDS["gemma3"]
    prefix = backend.prefill([9, 8, 7], backend.prefill([3, 4, 5, 6]))
    backend.save(prefix, tmp_path / "prefix.safetensors")
    loaded = backend.load_prefix(tmp_path / "prefix.safetensors")
    assert isinstance(loaded, PackedPrefix)
    assert (loaded.length, loaded.nbytes) == (prefix.length, prefix.nbytes)
    tree = random_tree(16, trunk=3, branches=3)
    np.testing.assert_array_equal(backend.read(loaded, tree).log_probs, backend.read(prefix, tree).log_probs)


def test_garbage_logits_are_an_error_not_an_argmax() -> None:
    broken = copy.deepcopy(tiny("llama"))
    backend = TorchBackend(broken, name="broken")
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="'broken' returned NaN"):
        backend.read(None, random_tree(17, trunk=3, branches=1))


def test_threads_do_not_run_each_others_attention() -> None:
    backend = BACKENDS["gemma3"]
    trees = [random_tree(seed, trunk=6, branches=8) for seed in range(8)]
    head = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    expected = [backend.read(backend.prefill(head), tree).log_probs for tree in trees]

    def work(tree: TokenTree) -> np.ndarray:
        for _ in range(5):
            backend.plain_logits(head)
            got = backend.read(backend.prefill(head), tree).log_probs
        return got

    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(work, trees), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_failure_inside_a_pass_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS["llama"]
    tree = random_tree(19, trunk=3, branches=2)
    before = backend.read(None, tree).log_probs

    def broken(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch_attention, "attend", broken)
        before_meter = (backend.meter.forward_passes, backend.meter.tokens_fed)
        with pytest.raises(BackendError, match=r"'model' failed on a pass of .* out of memory"):
            backend.read(None, tree)
        assert (backend.meter.forward_passes, backend.meter.tokens_fed) == before_meter
    np.testing.assert_allclose(backend.plain_logits([3, 4])[0], backend.plain_logits([3])[0], atol=1e-5)
    np.testing.assert_array_equal(backend.read(None, tree).log_probs, before)


def test_vocabulary_and_rows_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = random_tree(20, trunk=5, branches=12)
    whole = BACKENDS["llama"].read(BACKENDS["llama"].prefill([3, 4, 5]), tree).log_probs
    monkeypatch.setattr(torch_backend, "HEAD_BYTES", 4 * VOCABULARY * 3)
    monkeypatch.setattr(torch_backend, "ROWS_PER_PASS", 2)
    for layout in ("packed", "rows"):
        backend = TorchBackend(tiny("llama"), layout=layout)  # type: ignore[arg-type]
        np.testing.assert_allclose(backend.read(backend.prefill([3, 4, 5]), tree).log_probs, whole, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_scores_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BACKENDS[kind]
    tree = random_tree(21, trunk=30, branches=12)
    head = list(range(3, 30))
    whole = backend.read(backend.prefill(head), tree).log_probs
    monkeypatch.setattr(torch_attention, "SCORE_BYTES", 4 * 4 * 40 * 3)
    original = torch_attention.attend
    if kind == "llama":  # through the same code as a device without the CPU kernel
        monkeypatch.setattr(torch_attention, "attend", lambda *args: original(*args[:5], 1e6))
    np.testing.assert_allclose(backend.read(backend.prefill(head), tree).log_probs, whole, atol=1e-5)


def test_rows_do_not_run_a_document_again_for_every_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend(tiny("lfm2"))
    rng = np.random.default_rng(23)
    # All share a word, some share two: each shared beginning is short, what hangs from it is not.
    trunks = [
        [7, *more, *rng.integers(9, VOCABULARY, n).tolist()] for n, more in ((30, [8]), (1, []), (40, [8]), (25, [3]))
    ]
    tree = join(trunks, [random_tree(24, trunk=1, branches=9)] * len(trunks))
    expected = plain(backend, [3, 4], tree)
    prefix = backend.prefill([3, 4])
    fed = []
    for most in (0, 100, 10_000):
        monkeypatch.setattr(torch_backend, "REPEATED", most)
        before = backend.meter.tokens_fed
        np.testing.assert_allclose(backend.read(prefix, tree).log_probs, expected, atol=1e-5)
        fed.append(backend.meter.tokens_fed - before)
    assert fed[0] == len(tree)  # nothing twice
    assert len(tree) < fed[1] < len(tree) + len(trunks) * 100
    assert fed[2] > 3 * len(tree)


def test_a_kept_prefix_holds_its_own_keys_only() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SHARED, "num_key_value_heads": 1}))
    kept = TorchBackend(model).read(None, random_tree(25, trunk=3, branches=40), keep=3).prefix
    assert sum(t.untyped_storage().nbytes() for pair in kept.segments[0].layers.values() for t in pair) == kept.nbytes


@pytest.mark.parametrize("kind", ["granite", "cohere"])
def test_scaled_logits(kind: str) -> None:
    backend = TorchBackend(tiny(kind))
    tree = random_tree(22, trunk=5, branches=4)
    np.testing.assert_allclose(backend.read(None, tree).log_probs, plain(backend, [], tree), atol=1e-5)


def test_the_probe_rejects_what_does_not_reproduce_plain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_attention.attend

    def blind(q, k, v, scale, mask, softcap):  # type: ignore[no-untyped-def]
        return original(q, k, v, scale, None, softcap)  # every row sees every key

    monkeypatch.setattr(torch_attention, "attend", blind)
    backend = TorchBackend(tiny("llama"))
    assert backend.layout == "rows"
    assert "differ from plain ones" in backend.layout_reason


def test_a_layer_that_hides_its_window_is_not_run_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("gemma3"))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None  # what the attention function is told; the masks still know better
    assert "does not tell the attention interface its window" in TorchBackend(model).layout_reason


def test_missing_weights_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({k: v for k, v in weights.items() if "layers.1." not in k}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights do not fit config.json, missing keys: .*layers\.1"):
        TorchBackend.load(tmp_path, dtype="float32")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load this model"):
        TorchBackend.load(tmp_path, dtype="float32")


def test_a_damaged_prefix_file_is_noticed(tmp_path: Path) -> None:
    backend = BACKENDS["llama"]
    file = tmp_path / "prefix.safetensors"
    backend.save(backend.prefill([3, 4, 5, 6]), file)
    raw = bytearray(file.read_bytes())
    raw[-100:-50] = bytes(50)
    file.write_bytes(raw)
    with pytest.raises(BackendError, match="not those that were written"):
        backend.load_prefix(file)


def test_positions_that_turn_with_the_length_end_where_they_turn() -> None:
    config = copy.deepcopy(tiny("phi3").config)
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    assert torch_backend._longest(config) == 64


def test_the_fingerprint_tells_what_matters_apart(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    same = torch_backend._fingerprint(tmp_path, "float32", "cpu")
    assert torch_backend._fingerprint(tmp_path, "float32", "cpu") == same
    assert torch_backend._fingerprint(tmp_path, "bfloat16", "cpu") != same
    save_file({"other": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert torch_backend._fingerprint(tmp_path, "float32", "cpu") != same


def test_too_long_and_bad_arguments() -> None:
    backend = BACKENDS["llama"]
    with pytest.raises(BackendError, match="513 tokens do not fit"):
        backend.prefill([3] * 513)
    with pytest.raises(ParameterError, match="keep=99"):
        backend.read(None, random_tree(18, trunk=4, branches=2), keep=99)
