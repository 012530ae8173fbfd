"""DeepSeek-V2 and V2-Lite: shares are a softmax, a group counts by its best expert."""

from rootlace.runtime.model.families import deepseek
from rootlace.runtime.model.families.config_reader import TEXT, ConfigReader
from rootlace.runtime.model.families.reading import Family
from rootlace.runtime.model.families.spec import ModelSpec

METHODS = ("greedy", "group_limited_greedy")


def _read(given: ConfigReader) -> ModelSpec:
    method = given("topk_method", TEXT, "greedy")
    if method not in METHODS:
        given.refuse("topk_method", f"only {' and '.join(METHODS)} are supported")
    given.only("scoring_func", "softmax")
    given.only("norm_topk_prob", False)
    experts = deepseek.read_mixture(
        given,
        first_dense=0,
        shared=2,
        count=64,
        chosen=6,
        factor=given.number("routed_scaling_factor", 1.0),
    )
    if method == "greedy":
        given.pass_over("n_group", "topk_group")
    else:
        experts = deepseek.read_groups(given, experts)
    return deepseek.read_decoder(given, neighbours=True, experts=experts)


FAMILY = Family(
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    read=_read,
    bos_token_id=1,
    eos_token_id=2,
)
