"""DeepSeek-V3 and R1: shares are sigmoids, to which a correction is added in the choice alone, and
a group counts by its two best experts."""

from rootlace.runtime.model.families import deepseek
from rootlace.runtime.model.families.config_reader import COUNT, ConfigReader
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec


def _read(given: ConfigReader) -> ModelSpec:
    given.only("topk_method", "noaux_tc")
    given.only("scoring_func", "sigmoid")
    experts = deepseek.read_mixture(
        given,
        first_dense=3,
        shared=1,
        count=256,
        chosen=8,
        scores="sigmoid",
        normalised=given.flag("norm_topk_prob", True),
        factor=given.number("routed_scaling_factor", 2.5),
        best_of_group=2,
        correction=True,
    )
    experts = deepseek.read_groups(given, experts, 8, 4)
    keys = [key for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in given]
    return deepseek.read_decoder(
        given,
        neighbours=given.flag("rope_interleave", True),
        experts=experts,
        further_layers=max((given(key, COUNT) for key in keys), default=1),
    )


FAMILY = Family(
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    read=_read,
    bos_token_id=0,
    eos_token_id=1,
)
