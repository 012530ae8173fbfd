"""Steps of vLLM, timed one by one.

    PEER_PYTHON time_vllm.py FOLDER ROWSxCONTEXTxNEW ...

prints, as JSON, for each case the milliseconds of the fastest step in which each of the rows gets
`NEW` tokens and has about `CONTEXT` then.
"""

from __future__ import annotations

import json
import random
import sys
import time

from vllm import LLM, SamplingParams

DECODED = 32
"""Decode steps that are timed; they lie around the context that is asked for."""


def fastest(llm: LLM, rows: int, context: int, new: int, vocabulary: int) -> float:
    engine, decodes = llm.llm_engine, new == 1
    length = context - DECODED // 2 if decodes else context
    params = SamplingParams(
        temperature=0, max_tokens=DECODED + 1 if decodes else 1, ignore_eos=True, detokenize=False
    )
    best = float("inf")
    for repetition in range(2 if decodes else 4):
        for row in range(rows):
            prompt = [random.randrange(5, vocabulary) for _ in range(length)]
            engine.add_request(f"{repetition}.{row}", {"prompt_token_ids": prompt}, params)
        begun: set[str] = set()
        while engine.has_unfinished_requests():
            counted = not decodes or len(begun) == rows
            start = time.perf_counter()
            outputs = engine.step()
            took = time.perf_counter() - start
            begun |= {one.request_id for one in outputs if one.outputs[0].token_ids}
            if counted and len(outputs) == rows:
                best = min(best, took)
    return 1e3 * best


def main() -> None:
    folder, *cases = sys.argv[1:]
    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    found = [fastest(llm, *map(int, case.split("x")), vocabulary) for case in cases]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
