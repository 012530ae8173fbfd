"""The reference kernels: plain torch, any device. Each file specifies its operation."""

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference.attention import paged_attention
from rootlace.kernels.reference.attention_plan import plan_attention
from rootlace.kernels.reference.automaton import advance_states
from rootlace.kernels.reference.bitmask import apply_bitmask, apply_mask_rows
from rootlace.kernels.reference.embedding import embedding
from rootlace.kernels.reference.kv_cache import copy_slots, write_kv
from rootlace.kernels.reference.rms_norm import add_rms_norm, rms_norm
from rootlace.kernels.reference.rope import rope
from rootlace.kernels.reference.silu_mul import silu_mul

REFERENCE = KernelSet(
    name="reference",
    embedding=embedding,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    write_kv=write_kv,
    copy_slots=copy_slots,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
    apply_bitmask=apply_bitmask,
    apply_mask_rows=apply_mask_rows,
    advance_states=advance_states,
)

__all__ = ["REFERENCE"]
