"""The reference kernels: plain torch, any device. Each file specifies its operation."""

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.attention import paged_attention, plan_attention
from rootlace.kernels.reference.kv_cache import copy_slots, write_kv
from rootlace.kernels.reference.layers import (
    WEIGHTS,
    add_rms_norm,
    clamped_mul,
    embedding,
    feed_tokens,
    gelu,
    gelu_mul,
    gelu_tanh,
    layer_norm,
    linear,
    relu,
    rms_norm,
    rope_and_write,
    silu_mul,
)
from rootlace.kernels.reference.sampling import (
    edit_logits,
    pick_tokens,
    score_tokens,
    step_automata,
    token_logprobs,
)

REFERENCE = KernelSet(
    name="reference",
    weights=WEIGHTS,
    linear=linear,
    feed_tokens=feed_tokens,
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    layer_norm=layer_norm,
    rope_and_write=rope_and_write,
    write_kv=write_kv,
    copy_slots=copy_slots,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    gelu_mul=gelu_mul,
    clamped_mul=clamped_mul,
    relu=relu,
    gelu=gelu,
    gelu_tanh=gelu_tanh,
    step_automata=step_automata,
    edit_logits=edit_logits,
    pick_tokens=pick_tokens,
    token_logprobs=token_logprobs,
    score_tokens=score_tokens,
)
