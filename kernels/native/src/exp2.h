// Powers of two of a register of numbers.
#pragma once

#include "isa/isa.h"

namespace rootlace {

// 2^x; exactly 1 at 0 and 0 at -infinity; NaN of NaN. FINE: to about one unit in the last place of
// float32, else to 3e-6, far below what bfloat16 shows. The polynomials are minimax for 2^r,
// 0 <= r <= 1, relatively, with p(0) = 1.
template <bool FINE>
inline Native exp2(Native x) {
  constexpr auto multiply_add = Isa::multiply_add;
  Native r = Isa::fraction(x), p;
  if (FINE) {
    p = multiply_add(r, Isa::splat(1.867130070e-3f), Isa::splat(9.017030322e-3f));
    p = multiply_add(p, r, Isa::splat(5.579991310e-2f));
    p = multiply_add(p, r, Isa::splat(2.401644502e-1f));
    p = multiply_add(p, r, Isa::splat(6.931513118e-1f));
  } else {
    p = multiply_add(r, Isa::splat(1.342668427e-2f), Isa::splat(5.224247422e-2f));
    p = multiply_add(p, r, Isa::splat(2.412802048e-1f));
    p = multiply_add(p, r, Isa::splat(6.930448449e-1f));
  }
  return Isa::times_power(multiply_add(p, r, Isa::splat(1.0f)), x);
}

}  // namespace rootlace
