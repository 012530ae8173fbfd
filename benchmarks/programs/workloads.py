"""All workloads, in the order of the tables."""

from __future__ import annotations

from benchmarks.programs import (
    chat,
    generative_agents,
    hellaswag,
    json_decoding,
    llm_judge,
    mmlu,
    rag,
    react,
    skeleton_of_thought,
    tree_of_thought,
)
from benchmarks.programs.workload import Workload

_ALL = (
    *(mmlu.WORKLOAD, hellaswag.WORKLOAD, react.WORKLOAD, generative_agents.WORKLOAD),
    *(tree_of_thought.WORKLOAD, skeleton_of_thought.WORKLOAD, llm_judge.WORKLOAD),
    *(json_decoding.WORKLOAD, *chat.WORKLOADS, rag.WORKLOAD),
)
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
