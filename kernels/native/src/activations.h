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
template <class T>
[[gnu::noinline]] Vec gelu(Vec x) {
  Vec y;
  for (int i = 0; i < LANES; i += NATIVE) {
    Native part;
    std::memcpy(&part, reinterpret_cast<const float*>(&x) + i, sizeof part);
    const Native size = part < 0.0f ? -part : part;
    const Native t = Isa::reciprocal(Isa::multiply_add(size, Isa::splat(0.2316418882f), Isa::splat(1.0f)));
    Native p = Isa::splat(0.5f * 1.061405429f);
    for (float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
      p = Isa::multiply_add(p, t, Isa::splat(0.5f * next));
    // The normal distribution's tail above |x|.
    const Native beyond = p * t * exp2<sizeof(T) == 4 ? 5 : 4>(part * part * -0.72134752f);
    part = part * (part < 0.0f ? beyond : 1.0f - beyond);
    std::memcpy(reinterpret_cast<float*>(&y) + i, &part, sizeof part);
  }
  return y;
}

inline Vec relu(Vec x) { return x < 0 ? Vec{} : x; }

// To about 1e-7 with T float, 3e-6 with bf16.
template <class T>
[[gnu::noinline]] Vec tanh(Vec x) {
  return logistic<T>(splat(2.0f), 2.0f * x) - 1.0f;
}

}  // namespace rootlace
