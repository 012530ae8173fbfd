// Activations of MLPs, and the function that caps scores and logits. Only `silu` is inline, for the
// sake of compile time.
#pragma once

#include "exp2.h"
#include "vec.h"

namespace rootlace {

// x / (1 + e^-z), as precisely as T can show.
template <class T>
inline Vec logistic(Vec x, Vec z) {
  if constexpr (sizeof(T) == 4) return x / (1.0f + exp(-z));
  Vec y;
  for (int i = 0; i < LANES; i += NATIVE) {
    Native part, power;
    std::memcpy(&part, reinterpret_cast<const float*>(&x) + i, sizeof part);
    std::memcpy(&power, reinterpret_cast<const float*>(&z) + i, sizeof power);
    power = power * -1.44269504f;
    power = power > 126.0f ? Isa::splat(126.0f) : power;  // its reciprocal is a normal number
    part = part * Isa::reciprocal(1.0f + exp2<4>(power));
    std::memcpy(reinterpret_cast<float*>(&y) + i, &part, sizeof part);
  }
  return y;
}

template <class T>
inline Vec silu(Vec x) {
  return logistic<T>(x, x);
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
template <class T>
[[gnu::noinline]] Vec gelu_tanh(Vec x) {
  return logistic<T>(x, x * (1.5957691216f + 0.0713548163f * x * x));
}

// x / 2 (1 + erf(x / sqrt(2))), with the erf of Abramowitz and Stegun, 7.1.26: to 1.5e-7.
[[gnu::noinline]] inline Vec gelu(Vec x) {
  const Vec size = x < 0 ? -x : x;
  const Vec t = 1.0f / (1.0f + 0.2316418882f * size);
  Vec p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec beyond = 0.5f * p * t * exp(-0.5f * x * x);  // the normal distribution's part above |x|
  return x * (x < 0 ? beyond : 1.0f - beyond);
}

inline Vec relu(Vec x) { return x < 0 ? Vec{} : x; }

// To about 1e-7 (T float), or 3e-6.
template <class T>
[[gnu::noinline]] Vec tanh(Vec x) {
  return logistic<T>(splat(2.0f), 2.0f * x) - 1.0f;
}

}  // namespace rootlace
