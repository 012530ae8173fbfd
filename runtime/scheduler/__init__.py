"""Iteration-level scheduling over the radix tree, without torch.

scheduler   `Scheduler`: add, abort, plan, commit
queue       waiting requests: policy, client, priority, ageing
admission   running requests, preemption, prefill chunks, limits, deadlines
kv_manager  blocks of each request, pins, times to live, cache reports
batch, rows the arrays, masks and sample rows of a step plan
output      sampled and forced tokens, updates to the client, isolation of failing requests
speculation drafts from a predicted text; `prediction` matches the text, `pacing` measures cost
offload/    blocks on disk, in host memory, and on the way between engines
"""
