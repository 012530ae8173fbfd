// Any processor: registers of four numbers, for which compilers use the instructions that exist.
#pragma once

#include "plain.h"

namespace rootlace {

struct Scalar : Plain<4> {
  static constexpr const char* NAME = "generic";
};
using Isa = Scalar;

}  // namespace rootlace
