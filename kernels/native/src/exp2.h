// Powers of two of a register of numbers.
#pragma once

#include "isa/isa.h"

namespace rootlace {

// Returns 2^x; exactly 1 at 0 and 0 at -infinity; NaN for NaN. Relative errors: DEGREE 3: 9e-5, far
// below bfloat16's resolution; 4: 3e-6; 5: about one unit in the last place of float32. The
// polynomials are minimax for 2^r, 0 <= r <= 1, relatively, with p(0) = 1.
template <int DEGREE>
inline Native exp2(Native x) {
  constexpr float P[3][5] = {
      {7.706728e-2f, 2.2764474e-1f, 6.9511684e-1f},
      {1.342668427e-2f, 5.224247422e-2f, 2.412802048e-1f, 6.930448449e-1f},
      {1.867130070e-3f, 9.017030322e-3f, 5.579991310e-2f, 2.401644502e-1f, 6.931513118e-1f}};
  Native r = Isa::fraction(x), p = Isa::splat(P[DEGREE - 3][0]);
#pragma GCC unroll 5
  for (int i = 1; i < DEGREE; i++) p = Isa::multiply_add(p, r, Isa::splat(P[DEGREE - 3][i]));
  return Isa::times_power(Isa::multiply_add(p, r, Isa::splat(1.0f)), x);
}

}  // namespace rootlace
