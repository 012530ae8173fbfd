"""Gemma 3 (text): as Gemma 2 without caps, with normed queries and keys, and two rotations."""

from rootlace.runtime.model.families import gemma2
from rootlace.runtime.model.families.config_reader import SIZE, ConfigReader, read_two_ropes
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec

NAMES = gemma2.NAMES.with_parts(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def _read(given: ConfigReader) -> ModelSpec:
    given.only("attn_logit_softcapping", None)
    given("_sliding_window_pattern", SIZE, 6)  # what transformers writes, and does not read
    pattern = given("sliding_window_pattern", SIZE, 6)
    attention = gemma2.read_attention(
        given, lambda index: (index + 1) % pattern != 0, head_norm=True
    )
    return gemma2.read_decoder(
        given,
        NAMES,
        attention,
        None,
        rope=read_two_ropes(given, 1e6, 1e4, "rope_local_base_freq"),
        # Here `linear` scaling leads to the length that the file states, not beyond it.
        context=given.size("max_position_embeddings"),
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM",),
    model_types=("gemma3_text",),
    read=_read,
    bos_token_id=2,
    eos_token_id=1,
)
