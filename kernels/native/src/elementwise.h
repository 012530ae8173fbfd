// Operations on single rows between products: norms, rotations, sums. All are computed in float32
// and rounded to T once, when stored.
#pragma once

#include <cmath>

#include "vec.h"

namespace rootlace {

inline float sum(const float* x, int size) {
  Vec all = {};
  int i = 0;
  for (; i + LANES <= size; i += LANES) all += load(x + i);
  float total = sum(all);
  for (; i < size; i++) total += x[i];
  return total;
}

// Sums the squares of the differences from `mean`.
template <class X>
inline float sum_of_squares(const X* x, int size, float mean = 0) {
  Vec all[4] = {};
  int i = 0;
  for (; i + 4 * LANES <= size; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      Vec v = load(x + i + j * LANES) - mean;
      all[j] += v * v;
    }
  for (; i + LANES <= size; i += LANES) {
    Vec v = load(x + i) - mean;
    all[0] += v * v;
  }
  float total = sum((all[0] + all[1]) + (all[2] + all[3]));
  for (; i < size; i++) {
    const float v = to_float(x[i]) - mean;
    total += v * v;
  }
  return total;
}

// 1 / sqrt(mean((x - mean)^2) + eps).
template <class X>
inline float norm_scale(const X* x, int size, float eps, float mean = 0) {
  return 1.0f / std::sqrt(sum_of_squares(x, size, mean) / static_cast<float>(size) + eps);
}

// out = weight * x * scale. `out` may be `x`.
template <class X, class Out>
inline void scaled(const X* x, float scale, const float* weight, int size, Out* out) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < size; i++) store(out + i, to_float(x[i]) * scale * weight[i]);
}

// out = weight * x / sqrt(mean(x^2) + eps). `out` may be `x`.
template <class X, class Out>
inline void rms_norm(const X* x, const float* weight, int size, float eps, Out* out) {
  scaled(x, norm_scale(x, size, eps), weight, size, out);
}

// out = weight * (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) + bias, if there is one. `out` may
// be `x`.
template <class Out>
inline void layer_norm(const float* x, const float* weight, const float* bias, int size, float eps,
                       Out* out) {
  const float mean = sum(x, size) / static_cast<float>(size);
  const float scale = norm_scale(x, size, eps, mean);
  int i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vec y = (load(x + i) - mean) * scale * load(weight + i);
    store(out + i, bias ? y + load(bias + i) : y);
  }
  for (; i < size; i++) {
    const float y = (x[i] - mean) * scale * weight[i];
    store(out + i, bias ? y + bias[i] : y);
  }
}

// out = x, in another type.
template <class X, class Out>
inline void convert(const X* x, int size, Out* out) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(x + i));
  for (; i < size; i++) store(out + i, to_float(x[i]));
}

// out += factor * x.
template <class X>
inline void add(const X* x, float factor, int size, float* out) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, load(out + i) + load(x + i) * factor);
  for (; i < size; i++) out[i] += to_float(x[i]) * factor;
}

// x *= factor.
template <class X>
inline void multiply_by(float factor, int size, X* x) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(x + i, load(x + i) * factor);
  for (; i < size; i++) store(x + i, to_float(x[i]) * factor);
}

constexpr int MAX_HEAD_DIM = 256;

// Multiplies a head of `size` numbers by `scale` and `norm` (null: neither), then rotates it (`cos` null: not): with
// x1 and x2 its halves, out = [x1 cos - x2 sin, x2 cos + x1 sin]. `out` may be `x`.
template <class T>
inline void norm_and_rotate(const T* x, const float* norm, float scale, const float* cos,
                            const float* sin, int size, T* out) {
  alignas(64) float head[MAX_HEAD_DIM];
  convert(x, size, head);
  if (norm) scaled(head, scale, norm, size, head);
  if (!cos) return convert(head, size, out);
  int half = size / 2;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    Vec first = load(head + i), second = load(head + half + i);
    Vec c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; i++) {
    float first = head[i], second = head[half + i];
    store(out + i, first * cos[i] - second * sin[i]);
    store(out + half + i, second * cos[i] + first * sin[i]);
  }
}

// Returns the index of the largest number, the first of equals; -1 if that number is infinite, of either sign, or any
// number is NaN.
inline int32_t argmax(const float* x, int size) {
  float most = -INFINITY;
  bool nan = false;
  int i = 0;
  if (size >= LANES) {
    Vec best = splat(-INFINITY);
    Ints unordered = {};
    for (; i + LANES <= size; i += LANES) {
      Vec v = load(x + i);
      best = max_of(best, v);
      unordered |= v != v;
    }
    most = max_of(best);
    nan = bits_of(unordered) != 0;
  }
  for (; i < size; i++) {
    nan |= x[i] != x[i];
    most = x[i] > most ? x[i] : most;
  }
  if (nan || std::isinf(most)) return -1;
  // Reading takes most of the time, so the second pass ends at the number found.
  for (i = 0; i + LANES <= size; i += LANES)
    if (uint32_t bits = bits_of(load(x + i) == most)) return i + __builtin_ctz(bits);
  for (; i < size; i++)
    if (x[i] == most) return i;
  return -1;
}

}  // namespace rootlace
