"""Iteration-level scheduling over the radix tree, without torch.

scheduler   `Scheduler`: add, abort, plan, commit
queue       who is next: policy, client, priority, ageing, deadlines; who is preempted first
admission   running requests, preemption, prefill chunks, limits, deadlines
kv_manager  blocks of each request, pins, times to live, cache reports
batch       the arrays of a step plan, and the order of its rows
masks       sample rows, and the masks that constraints need
output      sampled and forced tokens, updates to the client, isolation of failing requests
speculation drafts of what is predicted or repeated; `drafter` follows texts, `pacing` measures cost
offload/    blocks on disk, in host memory, and on the way between engines
"""
