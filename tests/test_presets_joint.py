"""On a real model and a real form: joint mode is deciding one after another, and with ``walk`` writing under a grammar.

`tests/test_engine.py` shows the same on random models and schemas. ``python tests/test_presets_joint.py`` compares all presets,
which takes minutes, and prints a line per preset and scorer.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from embedded import embedded_model

from pcdlab import decide, load_preset, models
from pcdlab.baselines.grammar import grammar_lines, grammar_matcher, grammar_tokenizer, own_tokens
from pcdlab.baselines.json_stream import generate
from pcdlab.engine import Engine
from pcdlab.presets import Preset
from pcdlab.result import FieldDecision


@cache
def engine() -> Engine:
    return Engine(*models.load("smollm2-135m", "torch", "float32"))


@cache
def all_but_the_last(ids: tuple[int, ...]) -> Any:
    """The prompt without its last token, run once for all comparisons."""
    return engine().backend.prefill(ids[:-1])


def one_after_another(preset: Preset, scorer: Any) -> dict[str, Any]:
    """Decide field by field, each with the answers before it run through the model as text."""
    this = engine()
    compiled = this.compile(preset.schema)
    ids = compiled.prompt.ids(preset.context)
    prefix = this.backend.prefill(ids[-1:], all_but_the_last(tuple(ids)))
    values = {}
    for item in compiled:
        chosen = 0
        if not item.field.fixed:
            wish = decide.Wish(item, decide.resolve(scorer, len(item.field.labels)))
            plan = decide.plan([wish])
            found = decide.decide(plan.fields[0], this.backend.read(prefix, plan.tree).log_probs)
            assert isinstance(found, FieldDecision)
            chosen = item.field.labels.index(found.value)
        values[item.field.name] = item.field.labels[chosen]
        prefix = this.backend.prefill(item.line(chosen), prefix)
    return values


def written(preset: Preset) -> bytes:
    """The object as greedy writing under llguidance gives it, in the tokenizer's own tokens."""
    this = engine()
    compiled = this.compile(preset.schema)
    matcher = grammar_matcher(compiled, grammar_tokenizer(this.codec, this.backend.vocabulary))
    rule = own_tokens(grammar_lines(matcher, fast_forward=False), compiled)
    ids = compiled.prompt.ids(preset.context)
    steps = generate(this.backend, all_but_the_last(tuple(ids)), ids[-1:], rule, together=True)
    return this.codec.decode([step.token for step in steps]).encode()


def spelled(preset: Preset, values: dict[str, Any]) -> bytes:
    """The same object from values, in the tokens of their lines."""
    compiled = engine().compile(preset.schema)
    tokens = [t for item in compiled for t in item.line(item.field.labels.index(values[item.field.name]))]
    return engine().codec.decode(tokens).encode()


def test_on_the_embedded_model() -> None:
    embedded_model()
    preset = load_preset("talk_routing")
    for scorer in ("exact", "walk"):
        out = engine().extract(preset.context, preset.schema, mode="joint", scorer=scorer)  # type: ignore[arg-type]
        assert out.values == one_after_another(preset, scorer)
    assert spelled(preset, out.values) == written(preset)


if __name__ == "__main__":
    from pcdlab.presets import list_presets

    for name in sys.argv[1:] or [path.stem for path in list_presets()]:
        preset = load_preset(name)
        for scorer in ("walk", "exact"):
            out = engine().extract(preset.context, preset.schema, mode="joint", scorer=scorer)
            alone = engine().extract(preset.context, preset.schema, scorer=scorer)
            apart = sum(out.values[name] != alone.values[name] for name in preset.schema.names)
            same = out.values == one_after_another(preset, scorer)
            text = f", written object {'the same bytes' if spelled(preset, out.values) == written(preset) else 'DIFFERENT'}"
            print(
                f"{preset.id}, {scorer}: {'equal' if same else 'DIFFERENT'}{text if scorer == 'walk' else ''}, "
                f"{1 + len(out.stats.changes)} reading passes (changed {list(out.stats.changes)}), "
                f"{apart} of {len(out.values)} not as in isolation",
                flush=True,
            )
