// ARM's NEON: 32 registers of four numbers.
#pragma once

#include "plain.h"

namespace rootlace {

struct Neon : Plain<4> {
  static constexpr const char* NAME = "neon";
};
using Isa = Neon;

}  // namespace rootlace
