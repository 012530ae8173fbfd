// The best tokens of rows, among those that a packed mask allows.
#pragma once

#include <cstdint>

#include "team.h"

namespace rootlace {

// `rl_best` in a region; called by all threads with the same arguments.
void best(Crew& crew, const float* logits, int rows, int vocab, const int64_t* masks,
          int32_t* tokens);

}  // namespace rootlace
