"""StableLM: Llama with LayerNorm, of whose heads a part is rotated.

Attention and MLP may be side by side behind one norm.
"""

from rootlace.runtime.model.families import llama
from rootlace.runtime.model.families.config_reader import ConfigReader, read_rope
from rootlace.runtime.model.families.reading import (
    Family,
    decoder,
    divided_heads,
    gated_mlp,
    grouped_attention,
    layer_norm,
)
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = llama.NAMES.with_parts(
    q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}"
)


def _read(given: ConfigReader) -> ModelSpec:
    divided_heads(given)
    attention = grouped_attention(
        given,
        kv_heads=32,
        qkv_bias=given.flag("use_qkv_bias", False),
        own_norms=given.flag("qk_layernorm", False),
    )
    parallel = given.flag("use_parallel_residual", False)
    return decoder(
        given,
        NAMES,
        attention,
        gated_mlp(given),
        rope=read_rope(given, head_dim=attention.head_dim, partial=0.25),
        norm=layer_norm(given, placement="once" if parallel else "before"),
        parallel=parallel,
    )


FAMILY = Family(
    architectures=("StableLmForCausalLM",),
    model_types=("stablelm",),
    read=_read,
    bos_token_id=0,
    eos_token_id=0,
)
