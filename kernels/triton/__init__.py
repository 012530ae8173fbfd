"""Triton kernels, each tested against its reference. An import of this package imports triton.
`kernels.dispatch` imports the package on a GPU only."""

from msgspec.structs import replace

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import attention, kv_storage, layers, logits, pick_tokens

TRITON = replace(
    REFERENCE,
    name="triton",
    linear=layers.linear,
    feed_tokens=layers.feed_tokens,
    embedding=layers.embedding,
    rms_norm=layers.rms_norm,
    add_rms_norm=layers.add_rms_norm,
    rope_and_write=kv_storage.rope_and_write,
    copy_slots=layers.copy_slots,
    plan_attention=attention.plan_attention,
    paged_attention=attention.paged_attention,
    silu_mul=layers.silu_mul,
    gelu_mul=layers.gelu_mul,
    step_automata=pick_tokens.step_automata,
    edit_logits=logits.edit_logits,
    pick_tokens=pick_tokens.pick_tokens,
    token_logprobs=logits.token_logprobs,
)
