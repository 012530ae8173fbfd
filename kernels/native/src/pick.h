// Best tokens of rows, among the tokens that a packed mask allows.
#pragma once

#include <cstdint>

#include "team.h"

namespace rootlace {

// Returns the best token of a row, as `rl_logits` defines it; `mask`: address of the row's mask.
int32_t best(const float* logits, int vocab, int64_t mask);

// The same for all rows, in a region; all threads call this with the same arguments.
void best(Crew& crew, const float* logits, int rows, int vocab, const int64_t* masks,
          int32_t* tokens);

}  // namespace rootlace
