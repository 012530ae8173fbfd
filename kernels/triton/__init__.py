"""Triton kernels, each tested against its reference.

Importing this imports triton; `kernels.dispatch` does so on a GPU only.
"""

from dataclasses import replace

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton.attention import paged_attention, plan_attention
from rootlace.kernels.triton.kv_storage import rope_and_write
from rootlace.kernels.triton.layers import (
    add_rms_norm,
    copy_slots,
    embedding,
    feed_tokens,
    gelu_mul,
    rms_norm,
    silu_mul,
)
from rootlace.kernels.triton.logits import edit_logits, token_logprobs
from rootlace.kernels.triton.pick_tokens import pick_tokens, step_automata
from rootlace.kernels.triton.quantised_linear import linear

TRITON = replace(
    REFERENCE,
    name="triton",
    linear=linear,
    feed_tokens=feed_tokens,
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_and_write=rope_and_write,
    copy_slots=copy_slots,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    gelu_mul=gelu_mul,
    step_automata=step_automata,
    edit_logits=edit_logits,
    pick_tokens=pick_tokens,
    token_logprobs=token_logprobs,
)
