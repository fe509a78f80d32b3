"""The layout of a tree covers every allowed pair of rows exactly once, and no other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pcdlab.tokentree import TokenTree, TreeBuilder, join, lay_out


def make_tree(parents: list[int]) -> TokenTree:
    none = np.zeros(0, dtype=np.int64)
    array = np.array(parents, dtype=np.int64)
    return TokenTree(np.arange(len(parents), dtype=np.int64), array, none, none, np.zeros(1, dtype=np.int64))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    size = draw(st.integers(1, 40))
    # Mostly "child of the node before", so that chains appear.
    parents = [-1]
    for node in range(1, size):
        parents.append(draw(st.one_of(st.just(node - 1), st.integers(-1, node - 1))))
    return make_tree(parents)


def allowed(tree: TokenTree) -> np.ndarray:
    mask = np.zeros((len(tree), len(tree)), dtype=int)
    for node in range(len(tree)):
        mask[node, tree.path(node)] = 1
    return mask


@given(trees(), st.integers(1, 12))
@settings(max_examples=300, deadline=None)
def test_layout_covers_exactly_the_ancestor_pairs(tree: TokenTree, group_size: int) -> None:
    layout = lay_out(tree, group_size)
    count = np.zeros((len(tree), len(tree)), dtype=int)
    for chain in layout.chains:
        length = chain.stop - chain.start
        count[chain.start : chain.stop, chain.start : chain.stop] += np.tri(length, dtype=int)
        count[chain.stop : chain.reach, chain.start : chain.stop] += 1
    for group in layout.groups:
        assert group.stop - group.start <= group_size
        count[group.start : group.stop, group.start : group.stop] += group.mask
    expected = allowed(tree)[np.ix_(layout.order, layout.order)]
    np.testing.assert_array_equal(count, expected)
    np.testing.assert_array_equal(layout.order[layout.rows], np.arange(len(tree)))


@given(trees())
@settings(deadline=None)
def test_trunk_and_depths_by_definition(tree: TokenTree) -> None:
    np.testing.assert_array_equal(tree.depths, [len(tree.path(i)) - 1 for i in range(len(tree))])
    length = 0
    while length < len(tree) and tree.parents[length] == length - 1 and (tree.parents == length - 1).sum() == 1:
        length += 1
    assert tree.trunk == length


def test_a_very_deep_tree_needs_no_recursion() -> None:
    tree = make_tree(list(range(-1, 20_000)))
    layout = lay_out(tree)
    assert [(c.start, c.stop, c.reach) for c in layout.chains] == [(0, 20_001, 20_001)]


token_lists = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(st.lists(token_lists, min_size=1, max_size=8))
def test_builder_never_holds_a_path_twice(paths: list[list[int]]) -> None:
    builder = TreeBuilder()
    ends = [builder.extend(-1, path) for path in paths]
    tree = builder.build()
    for path, end in zip(paths, ends, strict=True):
        assert tree.tokens[tree.path(end)].tolist() == path
    spelled = [tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))]
    assert len(set(spelled)) == len(spelled)


def test_builder_merges_reads_at_one_node() -> None:
    builder = TreeBuilder()
    node = builder.extend(-1, [7])
    assert builder.read(node, [1, 2]) == (0, [0, 1])
    assert builder.read(node, [2, 3]) == (0, [1, 2])
    tree = builder.build()
    assert tree.read(0).tolist() == [1, 2, 3]


@given(st.lists(token_lists, min_size=1, max_size=5))
@settings(deadline=None)
def test_join_gives_every_document_its_own_branches(trunks: list[list[int]]) -> None:
    builder = TreeBuilder()
    end = builder.extend(-1, [10, 11])
    builder.read(end, [1, 2])
    builder.read(builder.extend(-1, [10, 12]), [3])
    branches = builder.build()
    tree = join(trunks, [branches] * len(trunks))
    assert (tree.parents < np.arange(len(tree))).all()
    per = len(branches.read_nodes)
    for d, trunk in enumerate(trunks):
        for i in range(per):
            below = branches.tokens[branches.path(int(branches.read_nodes[i]))].tolist()
            node = int(tree.read_nodes[d * per + i])
            assert tree.tokens[tree.path(node)].tolist() == [*trunk, *below]
            assert tree.read(d * per + i).tolist() == branches.read(i).tolist()
