"""Tree of thought: propose several steps, rate each, keep the best, continue from there.

    python examples/tree_of_thought.py [--model NAME | --url URL]

The program searches for the kindest review of a hotel. Each level's branches sample a sentence side
by side. A fork of each branch rates the sentence, after examples, by how much likelier "good" is
than "bad". The best branches continue. All branches share one prefix, which is computed once.

SmolLM2-135M recognises a kind sentence. Trees of thought were made for steps of proofs and
plans, which the model cannot judge.
"""

from __future__ import annotations

from operator import itemgetter

import rootlace as rl
from backend import arguments, backend
from judge import LABELS, SHOTS

BEGINNING = "Our review of the hotel: We arrived on Friday evening."
SENTENCE = r" [A-Z][a-z']+(,? [a-z']+){3,20}\."
LEVELS, WIDTH, KEEP = 2, 4, 2

Path = tuple[float, list[str], rl.ProgramState]
"""How kind it sounds, the sentences so far, and the branch they stand in."""


@rl.function
def rate(s: rl.ProgramState, sentence: str) -> None:
    s += "".join(f"Sentence: {text}\nSentiment: {label}\n\n" for text, label in SHOTS)
    s += f"Sentence: {sentence}\nSentiment: " + rl.select("verdict", LABELS)


def kindness(rated: rl.ProgramState) -> float:
    good, bad = rated.get_meta_info("verdict")["scores"]
    return float(good - bad)


@rl.function
def search(s: rl.ProgramState, beginning: str) -> list[str]:
    """Return the sentences along the best path."""
    s += beginning
    beam: list[Path] = [(0.0, [], s)]
    for level in range(LEVELS):
        grown: list[Path] = []
        for score, sentences, state in beam:
            forks = state.fork(WIDTH)
            # Each branch has its own seed, so the search is wide, but the same in every run.
            forks += [
                rl.gen("next", regex=SENTENCE, max_tokens=40, temperature=0.5, seed=seed)
                for seed in range(WIDTH)
            ]
            grown += [(score, [*sentences, fork["next"].strip()], fork) for fork in forks]
        ratings = rate.run_batch([{"sentence": sentences[-1]} for _, sentences, _ in grown])
        rated = [
            (score + kindness(rating), sentences, fork)
            for (score, sentences, fork), rating in zip(grown, ratings, strict=True)
        ]
        beam = sorted(rated, key=itemgetter(0), reverse=True)
        for score, sentences, _ in beam:
            print(f"level {level + 1}, {score:6.2f}: {' '.join(sentences)}")
        beam = beam[:KEEP]
    return beam[0][1]


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        best = search.run(BEGINNING).ret_value
    print(BEGINNING, *best)


if __name__ == "__main__":
    main()
