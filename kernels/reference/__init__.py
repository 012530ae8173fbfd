"""The reference kernels: plain torch, any device. Each file specifies its operation."""

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.automaton import advance_states
from rootlace.kernels.reference.bitmask import apply_bitmask, apply_mask_rows
from rootlace.kernels.reference.embedding import embedding
from rootlace.kernels.reference.gated import gelu_mul, silu_mul
from rootlace.kernels.reference.kv_cache import copy_slots
from rootlace.kernels.reference.rms_norm import add_rms_norm, rms_norm
from rootlace.kernels.reference.rope_and_write import rope_and_write

REFERENCE = KernelSet(
    name="reference",
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_and_write=rope_and_write,
    copy_slots=copy_slots,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    gelu_mul=gelu_mul,
    apply_bitmask=apply_bitmask,
    apply_mask_rows=apply_mask_rows,
    advance_states=advance_states,
)

__all__ = ["REFERENCE"]
