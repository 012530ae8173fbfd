// The best tokens of rows, among those that a packed mask allows.
#pragma once

#include <cstdint>

#include "team.h"

namespace rootlace {

// The best token of a row, as `rl_logits` finds it; `mask` is where its mask lies.
int32_t best(const float* logits, int vocab, int64_t mask);

// The same of all rows, in a region; called by all threads with the same arguments.
void best(Crew& crew, const float* logits, int rows, int vocab, const int64_t* masks,
          int32_t* tokens);

}  // namespace rootlace
