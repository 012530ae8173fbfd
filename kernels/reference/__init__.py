"""The reference kernels: plain torch, any device. Each file specifies its operation."""

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.activation import gelu, gelu_tanh, relu
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.automaton import step_automata
from rootlace.kernels.reference.embedding import embedding
from rootlace.kernels.reference.feed_tokens import feed_tokens
from rootlace.kernels.reference.gated import clamped_mul, gelu_mul, silu_mul
from rootlace.kernels.reference.kv_cache import copy_slots, write_kv
from rootlace.kernels.reference.layer_norm import layer_norm
from rootlace.kernels.reference.linear import WEIGHTS, linear
from rootlace.kernels.reference.logits import edit_logits
from rootlace.kernels.reference.logprobs import token_logprobs
from rootlace.kernels.reference.pick_tokens import pick_tokens
from rootlace.kernels.reference.rms_norm import add_rms_norm, rms_norm
from rootlace.kernels.reference.rope_and_write import rope_and_write
from rootlace.kernels.reference.score_tokens import score_tokens

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

__all__ = ["REFERENCE"]
