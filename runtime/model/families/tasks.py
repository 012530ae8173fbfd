"""Architectures of known families whose checkpoints have another head, or none: classifiers and
models that embed texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rootlace.runtime.model.families.given import SIZE, TABLE, Given
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec, WeightNames

TEXT_ENDINGS = ("ForCausalLM", "LMHeadModel")
CLASSIFIER, BASE = "ForSequenceClassification", "Model"
SCORES = "score"
"""The module of a classifier's head, the same in all families."""
LABELS = 2
"""How many labels there are where a configuration does not say."""


def known_by(architecture: str, known: Mapping[str, Family]) -> Family | None:
    """The family that an architecture belongs to, whatever its head; None: none of `known`."""
    if architecture in known:
        return known[architecture]
    for ending in (CLASSIFIER, BASE):
        stem = architecture.removesuffix(ending)
        found = [known[stem + text] for text in TEXT_ENDINGS if stem + text in known]
        if stem != architecture and found:
            return found[0]
    return None


def with_head(spec: ModelSpec, architecture: str, given: Given) -> ModelSpec:
    """What a family reads of a model that generates text, with the head of this architecture.

    The names of a model saved without its head, which lack the first part, are among the `others`:
    models that embed texts are stored so under any architecture.
    """
    names = spec.names
    found = _bare(names)
    if found is not None:
        names = replace(names, others=(*names.others, found))
    if architecture.endswith(CLASSIFIER):
        labels = given("num_labels", SIZE.or_none(), None) or _named_labels(given)
        return _without_logits(spec, replace(names, head=SCORES), labels)
    if architecture.endswith(BASE) and not architecture.endswith(TEXT_ENDINGS):
        return _without_logits(spec, names, 0)
    return replace(spec, names=names)


def _without_logits(spec: ModelSpec, names: WeightNames, labels: int) -> ModelSpec:
    """What is done to logits of tokens is not done to scores of labels."""
    return replace(
        spec,
        names=names,
        labels=labels,
        tied_embeddings=False,
        logit_multiplier=1.0,
        logit_soft_cap=0.0,
    )


def _named_labels(given: Given) -> int:
    return len(given("id2label", TABLE.or_none(), None) or ()) or LABELS


def _bare(names: WeightNames) -> WeightNames | None:
    """The names without their first part; None where they have none in common."""
    first = names.embedding.partition(".")[0] + "."
    inside = (names.embedding, names.layer, names.final_norm)
    if not all(name.startswith(first) for name in inside):
        return None
    return replace(
        names,
        embedding=names.embedding.removeprefix(first),
        layer=names.layer.removeprefix(first),
        final_norm=names.final_norm.removeprefix(first),
        positions=names.positions.removeprefix(first),
        others=(),
    )
