"""The reference kernels: plain torch, any device. Each file specifies its operation."""

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference import attention, kv_cache, layers, sampling

REFERENCE = KernelSet(
    name="reference",
    weights=layers.WEIGHTS,
    linear=layers.linear,
    feed_tokens=layers.feed_tokens,
    embedding=layers.embedding,
    rms_norm=layers.rms_norm,
    add_rms_norm=layers.add_rms_norm,
    layer_norm=layers.layer_norm,
    rope_and_write=layers.rope_and_write,
    write_kv=kv_cache.write_kv,
    copy_slots=kv_cache.copy_slots,
    plan_attention=attention.plan_attention,
    paged_attention=attention.paged_attention,
    silu_mul=layers.silu_mul,
    gelu_mul=layers.gelu_mul,
    clamped_mul=layers.clamped_mul,
    relu=layers.relu,
    gelu=layers.gelu,
    gelu_tanh=layers.gelu_tanh,
    step_automata=sampling.step_automata,
    edit_logits=sampling.edit_logits,
    pick_tokens=sampling.pick_tokens,
    token_logprobs=sampling.token_logprobs,
    score_tokens=sampling.score_tokens,
)
