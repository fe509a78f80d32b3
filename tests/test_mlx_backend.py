"""MLX runs the same weights as torch and gives the same numbers; rows over a shared prefix equal plain forward passes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import VOCABULARY, hash_of, tiny
from tokenizers_zoo import codec, tokenizer

from pcdlab.backends.conformance import check_backend, log_softmax
from pcdlab.backends.torch import TorchBackend
from pcdlab.engine import Engine
from pcdlab.errors import BackendError, ModelError, NumericsError, ParameterError
from pcdlab.heads import HeadCache
from pcdlab.schema import Schema
from pcdlab.tokentree import TokenTree, TreeBuilder, join

mx = pytest.importorskip("mlx.core", reason="the mlx extra is not installed")
pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

from mlx.utils import tree_map  # noqa: E402
from mlx_lm import utils as mlx_utils  # noqa: E402
from mlx_lm.models import cache as mlx_caches  # noqa: E402

from pcdlab.backends.mlx import MlxBackend, MlxPrefix  # noqa: E402

mx.disable_compile()  # fused elementwise steps cost a C++ compiler run each on a CPU

KINDS = ["llama", "qwen3", "gemma2", "gemma3", "lfm2", "qwen3_next"]
EVERYTHING = list(range(VOCABULARY))


# --- the same weights under both frameworks ---------------------------------------------------------------------------


def torch_model(kind: str, vocabulary: int = VOCABULARY, **changes: Any) -> Any:
    """A tiny random model that both frameworks run alike."""
    config = copy.deepcopy(tiny(kind).config)
    if kind == "gemma3":
        config.hidden_size = 64  # mlx-lm rounds the root of this to bfloat16
    if kind == "gemma2":
        config.sliding_window = 512  # mlx-lm has no windows there
    vars(config).update(changes, vocab_size=vocabulary)
    torch.manual_seed(hash_of(kind))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Linear attention adds up more rounding, in either framework, than the comparison allows.
                parameter.normal_(0.0, 0.07 if kind == "qwen3_next" else 0.15)
    return model.eval()


def write(model: Any, folder: Path) -> Path:
    """A model folder as published ones are, of which mlx-lm expects more than transformers writes for tiny models."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "lfm2":
        config |= {"block_dim": config["hidden_size"], "block_ff_dim": config["intermediate_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "qwen3_next":  # mlx-lm turns these round only where there are experts
        weights = dict(model.state_dict())
        for name, weight in weights.items():
            if "conv1d" in name:
                weights[name] = weight.transpose(1, 2).contiguous()
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                weights[name] = weight + 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@functools.cache
def pair(kind: str, vocabulary: int = VOCABULARY, positions: int = 512) -> tuple[TorchBackend, MlxBackend]:
    model = torch_model(kind, vocabulary, max_position_embeddings=positions)
    with tempfile.TemporaryDirectory() as folder:
        return TorchBackend(model), MlxBackend.load(write(model, Path(folder)))


def mlx_model(kind: str, **arguments: Any) -> Any:
    """A tiny random model of mlx-lm's own, for what transformers would make slow or different."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict({"model_type": kind, **arguments}))
    mx.random.seed(hash_of(kind))

    def fill(array: Any) -> Any:
        return 0.15 * mx.random.normal(array.shape) if array.ndim > 1 else array

    model.update(tree_map(fill, model.parameters()))
    mx.eval(model.parameters())
    return model


SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=512,
)
WINDOWED = ["sliding_attention", "full_attention"] * 3


# --- trees ------------------------------------------------------------------------------------------------------------


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).tolist()


def random_tree(seed: int, trunk: int, branches: int) -> TokenTree:
    """A trunk with branching twigs below it, every node read in full."""
    rng = np.random.default_rng(seed)
    builder = TreeBuilder()
    nodes = [builder.extend(-1, rng.integers(3, VOCABULARY, trunk).tolist())]
    for _ in range(branches):
        nodes.append(builder.extend(int(rng.choice(nodes)), rng.integers(3, VOCABULARY, rng.integers(1, 5)).tolist()))
    for node in range(len(builder.tokens)):
        builder.read(node, EVERYTHING)
    return builder.build()


def plain(backend: Any, head: list[int], tree: TokenTree) -> np.ndarray:
    """The reference: one plain forward pass per read."""
    paths = [tree.tokens[tree.path(int(node))].tolist() for node in tree.read_nodes]
    return np.concatenate([log_softmax(backend.plain_logits([*head, *path])[-1]) for path in paths])


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    """Largest distance of two sets of whole distributions."""
    return 0.5 * float(np.abs(np.exp(one) - np.exp(other)).reshape(-1, VOCABULARY).sum(-1).max())


# --- agreement with torch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_those_of_torch(kind: str) -> None:
    """With a prompt of 23 tokens and, for gemma3, a window of 7."""
    on_torch, on_mlx = pair(kind)
    assert (on_mlx.layout, on_mlx.layout_reason) == ("rows", "reproduces plain forward passes")
    assert (on_mlx.dtype, on_mlx.vocabulary, on_mlx.max_tokens) == ("float32", VOCABULARY, 512)
    assert on_mlx.window == (7 if kind == "gemma3" else None)
    head, tree = ids(1, 23), random_tree(2, trunk=12, branches=9)
    expected = plain(on_torch, head, tree)
    np.testing.assert_allclose(on_mlx.read(on_mlx.prefill(head), tree).log_probs, expected, atol=1e-5)
    np.testing.assert_allclose(plain(on_mlx, head, tree), expected, atol=1e-5)


def test_the_vocabulary_projection_is_split_off_where_it_reproduces_the_model() -> None:
    split = {kind: pair(kind)[1]._head is not None for kind in KINDS}
    assert split == {kind: kind != "gemma2" for kind in KINDS}  # Gemma 2 caps its logits


SCHEMA = Schema.from_dict(
    {
        "risk_level": {"type": "enum", "choices": ["LOW", "MEDIUM", "HIGH", "HIGHEST"]},
        "urgent": {"type": "boolean", "description": "Needs an answer today"},
        "team": {"type": "enum", "choices": ["billing", "shipping", "other"], "depends_on": ["urgent"]},
    }
)


@pytest.mark.parametrize(("kind", "name"), [("llama", "smollm"), ("gemma3", "gemma"), ("lfm2", "llama3")])
@pytest.mark.parametrize("mode", ["isolated", "joint"])
def test_decisions_equal_those_of_torch(kind: str, name: str, mode: Any) -> None:
    texts = ["Your order 4711 has been shipped.", "The payment was declined. Call before noon!"]
    on_torch, on_mlx = (Engine(b, codec(name)) for b in pair(kind, len(tokenizer(name)), 4096))
    ours = on_mlx.extract_many(texts, SCHEMA, mode=mode, progress=False)
    theirs = on_torch.extract_many(texts, SCHEMA, mode=mode, progress=False)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.backend, one.values) == ("mlx", other.values)
        for field in SCHEMA.names:
            numbers = [list(out.fields[field].log_probs.values()) for out in (one, other)]
            np.testing.assert_allclose(*numbers, atol=3e-5)


def test_positions_follow_the_configuration_of_transformers_5(tmp_path: Path) -> None:
    """rope_parameters, which mlx-lm's Llama does not read, or a context stretched by a factor."""
    for number, rope in enumerate(
        [
            {"rope_type": "default", "rope_theta": 500.0},
            {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
        ]
    ):
        model = torch_model("llama", rope_parameters=rope)
        tokens = ids(3, 40)
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        backend = MlxBackend.load(write(model, tmp_path / str(number)))
        np.testing.assert_allclose(backend.plain_logits(tokens), expected, atol=1e-5)


# --- rows over a prefix -----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(0, 14), st.sampled_from(["llama", "gemma3", "lfm2"]))
@settings(max_examples=12, deadline=None)
def test_any_tree_equals_plain(seed: int, trunk: int, branches: int, kind: str) -> None:
    backend = pair(kind)[1]
    head = ids(seed, seed % 17)
    tree = random_tree(seed, trunk + (branches == 0), branches)
    prefix = backend.prefill(head) if head else None
    np.testing.assert_allclose(backend.read(prefix, tree).log_probs, plain(backend, head, tree), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_grow_in_any_number_of_steps_and_never_change(kind: str) -> None:
    backend = pair(kind)[1]
    tokens, tree = ids(4, 30), random_tree(5, trunk=4, branches=5)
    first = backend.prefill(tokens[:11])
    before = backend.read(first, tree).log_probs
    second = backend.prefill(tokens[11:12], first)
    third = backend.prefill(tokens[12:], second)
    assert (first.length, second.length, third.length) == (11, 12, 30)
    one_shot = backend.read(backend.prefill(tokens), tree).log_probs
    np.testing.assert_allclose(backend.read(third, tree).log_probs, one_shot, atol=1e-5)
    stream = backend.stream(first)
    for token in tokens[:9]:  # single tokens are written in place
        stream.feed([token])
    stream.rollback(2)
    np.testing.assert_array_equal(backend.read(first, tree).log_probs, before)
    reading = backend.read(first, tree, keep=3)
    np.testing.assert_allclose(reading.log_probs, before, atol=1e-5)
    assert reading.prefix.length == 14
    follow = random_tree(6, trunk=1, branches=2)
    np.testing.assert_allclose(
        backend.read(reading.prefix, follow).log_probs,
        plain(backend, [*tokens[:11], *tree.tokens[:3].tolist()], follow),
        atol=1e-5,
    )


def test_long_prompts_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pair("gemma3")[1]
    head, tree = ids(7, 40), random_tree(8, trunk=20, branches=4)
    expected = plain(backend, head, tree)
    monkeypatch.setattr("pcdlab.backends.mlx.PREFILL", 9)
    np.testing.assert_allclose(backend.read(backend.prefill(head), tree).log_probs, expected, atol=1e-5)


def test_documents_run_their_long_beginnings_once() -> None:
    """A row per document and branch would feed each document as often as it has branches."""
    backend = pair("llama")[1]
    trunks = [ids(9 + i, length) for i, length in enumerate((50, 1, 70, 50))]
    trunks[3] = [*trunks[0][:20], *trunks[3][20:]]  # begins like the first
    branches = random_tree(13, trunk=2, branches=12)
    prefix = backend.prefill([4, 5, 6])
    tree = join(trunks, [branches] * 4)
    before = backend.meter.tokens_fed
    together = backend.read(prefix, tree).log_probs.reshape(4, -1)
    assert backend.meter.tokens_fed - before < 2 * len(tree)
    for trunk, got in zip(trunks, together, strict=True):
        np.testing.assert_allclose(got, plain(backend, [4, 5, 6, *trunk], branches), atol=1e-5)


def test_one_node_may_be_read_twice() -> None:
    backend = pair("llama")[1]
    branches = random_tree(14, trunk=2, branches=2)
    twice = backend.read(None, join([[5, 6], [5, 6]], [branches, branches])).log_probs
    np.testing.assert_array_equal(*np.split(twice, 2))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "lfm2"])
def test_stream_feeds_and_rolls_back(kind: str) -> None:
    backend = pair(kind)[1]
    tokens = ids(15, 60)
    expected = backend.plain_logits(tokens)
    stream = backend.stream(backend.prefill(tokens[:5]))
    got = [stream.feed(tokens[5:6]), stream.feed(tokens[6:20])]
    np.testing.assert_allclose(stream.feed(tokens[20:23], last=True), expected[22:23], atol=1e-5)
    stream.rollback(3)
    assert stream.length == 20
    got += [stream.feed([token]) for token in tokens[20:]]
    np.testing.assert_allclose(np.concatenate(got), expected[5:], atol=1e-5)
    with pytest.raises(ParameterError, match="only 55 tokens"):
        stream.rollback(56)
    stream.rollback(55)
    np.testing.assert_allclose(stream.feed(tokens[5:]), expected[5:], atol=1e-5)


# Kinds of cache that the models above do not have.
OTHER_CACHES = {
    "falcon_h1": dict(SIZES, mamba_d_head=8, mamba_d_ssm=32, mamba_d_state=8, mamba_n_heads=4, lm_head_multiplier=1.0),
    "baichuan_m1": dict(SIZES, sliding_window=7, sliding_window_layers=[0, 2], conv_window=2),
    "llama4": dict(
        text_config=dict(
            SIZES,
            model_type="llama4_text",
            attention_bias=False,
            attention_chunk_size=16,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=48,
            num_experts_per_tok=1,
            num_local_experts=2,
            rope_scaling=None,
            use_qk_norm=True,
        )
    ),
    "gpt_oss": dict(SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=7, layer_types=WINDOWED[:4]),
    "afm7": dict(
        vocab_size=VOCABULARY, hidden_dim=32, num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2
    ),
    "recurrent_gemma": dict(
        SIZES,
        num_key_value_heads=1,
        attention_bias=False,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=7,
        block_types=["recurrent", "attention"],
    ),
}


@pytest.mark.parametrize("kind", OTHER_CACHES)
def test_other_caches_keep_the_contract(kind: str) -> None:
    """Nested, chunked and shared caches, attention sinks, recurrence: all on a broadcast prefix."""
    backend = MlxBackend(mlx_model(kind, **OTHER_CACHES[kind]), kind, 512, fingerprint="any")
    assert backend.layout_reason == "reproduces plain forward passes"
    checks = {check.name: check for check in check_backend(backend, tokens=40)}
    assert [check for check in checks.values() if check.passed is False] == []
    assert checks["prefix on disk"].passed


def test_unknown_caches_are_copied_whole_and_run_row_by_row() -> None:
    class OwnCache(mlx_caches.KVCache):
        pass

    model = mlx_model("llama", **SIZES)
    type_of_model = type(model)
    model.__class__ = type("Own", (type_of_model,), {"make_cache": lambda self: [OwnCache() for _ in self.layers]})
    backend = MlxBackend(model, fingerprint="any")
    assert backend.layout_reason == "one row at a time: caches of its own kind cannot be broadcast"
    assert backend.fingerprint is None
    checks = check_backend(backend, tokens=40)
    assert [check for check in checks if check.passed is False] == []
    with pytest.raises(BackendError, match="cannot be written to disk"):
        backend.save(backend.prefill([3, 4]), Path("nowhere"))


# --- quantization and number formats ----------------------------------------------------------------------------------


def test_quantized_checkpoints_run(tmp_path: Path) -> None:
    model = mlx_model("llama", **dict(SIZES, hidden_size=64, head_dim=32, intermediate_size=64))
    config = {"model_type": "llama", **SIZES, "hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    quantized, config = mlx_utils.quantize_model(model, config, group_size=32, bits=4)
    mlx_utils.save_model(tmp_path, quantized)
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = MlxBackend.load(tmp_path)
    assert backend.dtype == "4-bit float32"
    head, tree = ids(16, 20), random_tree(17, trunk=5, branches=6)
    np.testing.assert_allclose(
        backend.read(backend.prefill(head), tree).log_probs, plain(backend, head, tree), atol=1e-5
    )
    short = MlxBackend.load(tmp_path, "bfloat16")
    assert short.dtype == "4-bit bfloat16"
    assert short.module.model.layers[0].self_attn.q_proj.weight.dtype == mx.uint32
    got = short.read(short.prefill(head), tree).log_probs
    assert total_variation(got, plain(short, head, tree)) < 0.05


def test_quantized_keys_and_values() -> None:
    model = mlx_model("llama", **dict(SIZES, head_dim=32))
    whole, eight = MlxBackend(model), MlxBackend(model, kv_bits=8, kv_group_size=32, fingerprint="any")
    assert eight.dtype == "float32, 8-bit KV"
    head, tree = ids(18, 40), random_tree(19, trunk=5, branches=6)
    prefix = eight.prefill(head[30:], eight.prefill(head[:30]))
    assert prefix.nbytes < 0.4 * whole.prefill(head).nbytes
    got = eight.read(prefix, tree).log_probs
    # A rounding difference may move a value into the next of 256 steps.
    assert total_variation(got, plain(eight, head, tree)) < 0.005
    assert 0 < total_variation(got, plain(whole, head, tree)) < 0.05
    assert [check for check in check_backend(eight, tokens=40) if check.passed is False] == []
    with pytest.raises(BackendError, match="in 8 bits, groups of 64"):
        MlxBackend(model, kv_bits=8)


def test_number_formats(tmp_path: Path) -> None:
    folder = write(torch_model("gemma3").to(torch.bfloat16), tmp_path)
    assert MlxBackend.load(folder).dtype == "bfloat16"
    backends = {dtype: MlxBackend.load(folder, dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert {dtype: backend.dtype for dtype, backend in backends.items()} == {dtype: dtype for dtype in backends}
    assert len({backend.fingerprint for backend in backends.values()}) == 3
    head, tree = ids(20, 20), random_tree(21, trunk=5, branches=6)
    exact = backends["float32"].read(backends["float32"].prefill(head), tree).log_probs
    for backend in backends.values():
        got = backend.read(backend.prefill(head), tree).log_probs
        assert total_variation(got, plain(backend, head, tree)) < 0.05
        assert total_variation(got, exact) < 0.05
    with pytest.raises(ParameterError, match="'int8' is unknown"):
        MlxBackend.load(folder, "int8")


# --- memory -----------------------------------------------------------------------------------------------------------


def fields(count: int) -> TokenTree:
    """A document of 40 tokens, and a branch of six tokens per field."""
    builder = TreeBuilder()
    end = builder.extend(-1, ids(22, 40))
    for field in range(count):
        builder.read(builder.extend(end, [field, *ids(field, 5)]), [3, 4, 5])
    return builder.build()


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_scoring_never_holds_the_copies_of_two_layers(kind: str) -> None:
    sizes = dict(SIZES, hidden_size=64, head_dim=32, max_position_embeddings=2048)
    if kind == "qwen3_next":
        sizes |= dict(
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            num_experts=0,
            num_experts_per_tok=0,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=0,
            mlp_only_layers=[],
            moe_intermediate_size=0,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            attention_bias=False,
            partial_rotary_factor=0.25,
            full_attention_interval=2,
        )
    backend = MlxBackend(mlx_model(kind, **sizes))
    attention = sum(isinstance(c, mlx_caches.KVCache) for c in backend._fresh())
    tree, keep = fields(28), 40

    def peak(prefix: MlxPrefix) -> int:
        """Bytes a read needs on top of what is there before."""
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        backend.read(prefix, tree, keep)
        return mx.get_peak_memory() - before

    short, long = backend.prefill(ids(23, 1)), backend.prefill(ids(23, 600))
    peak(short)  # what is made once
    beyond_its_own_needs = peak(long) - peak(short)
    assert beyond_its_own_needs <= 28 * (long.nbytes - short.nbytes) / attention


# --- prefixes on disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "qwen3_next"])
def test_prefixes_survive_the_disk(kind: str, tmp_path: Path) -> None:
    backend = pair(kind)[1]
    assert backend.fingerprint
    prefix = backend.prefill([9, 8, 7], backend.prefill(ids(23, 12)))
    backend.save(prefix, tmp_path / "unfinished.tmp")  # as the head cache does before it renames the file
    (path,) = tmp_path.iterdir()
    loaded = backend.load_prefix(path)
    path.unlink()
    assert loaded.length == prefix.length
    tree = random_tree(24, trunk=3, branches=3)
    np.testing.assert_array_equal(backend.read(loaded, tree).log_probs, backend.read(prefix, tree).log_probs)
    stream = backend.stream(loaded)
    np.testing.assert_array_equal(stream.feed([5, 6]), backend.stream(prefix).feed([5, 6]))


def test_a_prefix_that_cannot_be_written_is_an_operating_system_error(tmp_path: Path) -> None:
    """Which the head cache lives with."""
    backend = pair("llama")[1]
    with pytest.raises(OSError, match="missing"):
        backend.save(backend.prefill([3, 4]), tmp_path / "missing" / "prefix.safetensors")


def test_a_new_engine_finds_its_heads(tmp_path: Path) -> None:
    backend = pair("llama", len(tokenizer("smollm")), 4096)[1]
    outs = [Engine(backend, codec("smollm"), HeadCache(backend, tmp_path)).extract("Hello", SCHEMA) for _ in range(2)]
    assert [out.stats.cached_tokens > 0 for out in outs] == [False, True]
    assert outs[0].values == outs[1].values


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_garbage_logits_are_an_error_not_an_argmax() -> None:
    model = mlx_model("llama", **SIZES)
    backend = MlxBackend(model, name="broken")
    model.model.norm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="'broken' returned NaN"):
        backend.read(None, random_tree(25, trunk=3, branches=1))


def test_too_long_and_bad_arguments() -> None:
    backend = pair("llama")[1]
    with pytest.raises(BackendError, match="513 tokens do not fit"):
        backend.prefill([3] * 513)
    with pytest.raises(BackendError, match="513 tokens do not fit"):
        backend.stream(backend.prefill([3] * 512)).feed([3])
    with pytest.raises(ParameterError, match="at least one token"):
        backend.prefill([])
    tree = random_tree(26, trunk=4, branches=2)
    with pytest.raises(ParameterError, match="keep=99"):
        backend.read(None, tree, keep=99)
    loose = TokenTree(tree.tokens, tree.parents, np.array([-1]), np.array([3]), np.array([0, 1]))
    with pytest.raises(ParameterError, match="node -1"):
        backend.read(None, loose)


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot load this model: FileNotFoundError"):
        MlxBackend.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelError, match="cannot load this model"):
        MlxBackend.load(tmp_path)
    folder = write(torch_model("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ModelError, match="cannot load this model: ValueError"):
        MlxBackend.load(folder)


def test_without_mlx_the_error_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    found = importlib.util.find_spec("pcdlab.backends.mlx")
    assert found is not None
    assert found.loader is not None
    spec = importlib.util.spec_from_file_location("mlx_backend_without_mlx", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with pytest.raises(BackendError, match=r"pip install 'pcdlab\[mlx\]'"):
        module.MlxBackend.load(Path("anything"))
