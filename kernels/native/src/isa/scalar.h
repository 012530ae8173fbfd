// Any processor: registers of four numbers, which compilers make of what there is.
#pragma once

#include "plain.h"

namespace rootlace {

struct Scalar : Plain<4> {
  static constexpr const char* NAME = "generic";
};
using Isa = Scalar;

}  // namespace rootlace
