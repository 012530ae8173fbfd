// Vector instructions in plain C++, with their order of sums and their rounding, so that every set's packing, edges
// and sums are tested on any processor. Where the set exists, tests compare it with its twin bit by bit. For example,
// `-DROOTLACE_VECTORS=NeonBf16Twin` chooses one.
#pragma once

#include <cfloat>

#include "plain.h"

namespace rootlace {

// Adds products with one rounding, also on processors without an instruction for that.
template <int WIDTH>
struct FusedTwin : Plain<WIDTH> {
  using Base = Plain<WIDTH>;
  using Native = typename Base::Native;
  using NativeInts = typename Base::NativeInts;

  static Native multiply_add(Native a, Native b, Native c) {
    for (int i = 0; i < WIDTH; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
  }

  template <int ROWS, int COLUMNS, class Panel, class Number>
  static void add_numbers(Native (&sums)[ROWS][COLUMNS], Panel at, Number&& number) {
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++)
        sums[i][j] =
            multiply_add(Base::splat(number(i)), load_as<Native>(at(j)), sums[i][j]);
  }

  template <int ROWS, int COLUMNS, class Panel, class Word>
  static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at, Word&& word) {
    for (int i = 0; i < ROWS; i++) {
      const NativeInts pair = word(i) - NativeInts{};
      for (int j = 0; j < COLUMNS; j++) {
        const NativeInts panel = load_as<NativeInts>(at(j));
        sums[i][j] = add_half<true>(pair, panel, sums[i][j]);
        sums[i][j] = add_half<false>(pair, panel, sums[i][j]);
      }
    }
  }

 private:
  template <bool ODD>
  static Native add_half(NativeInts pair, NativeInts panel, Native sum) {
    return multiply_add(Base::template half<ODD>(pair), Base::template half<ODD>(panel), sum);
  }
};

// DOT: a function of a sum and two pairs of bfloat16, odd numbers in the upper halves.
template <class Base, float (*DOT)(float, uint32_t, uint32_t)>
struct PairsTwin : Base {
  using Native = typename Base::Native;

  template <int ROWS, int COLUMNS, class Panel, class Word>
  static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at, Word&& word) {
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++)
        for (int k = 0; k < Base::NATIVE; k++)
          sums[i][j][k] =
              DOT(sums[i][j][k], static_cast<uint32_t>(word(i)), load_as<uint32_t>(at(j) + 2 * k));
  }
};

inline float number_of(uint32_t bits) { return load_as<float>(&bits); }

// Returns zero for a subnormal number.
inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

// VDPBF16PS (Intel's manual, volume 2): adds the product of the odd numbers, then of the even ones, each with one
// rounding to nearest. Subnormal numbers count as zero, as inputs and as results.
inline float vdpbf16ps(float sum, uint32_t a, uint32_t b) {
  const auto add = [&](uint32_t x, uint32_t y) {
    return flushed(std::fma(flushed(number_of(x)), flushed(number_of(y)), flushed(sum)));
  };
  sum = add(a & 0xffff0000u, b & 0xffff0000u);
  return add(a << 16, b << 16);
}

// Returns a + b as BFDOT rounds: to odd (of two neighbours the one whose last bit is set), subnormal numbers zero,
// the default NaN for any NaN (Arm's manual, FPAdd_BF16 and BFRound).
inline float odd_sum(float a, float b) {
  a = flushed(a), b = flushed(b);
  double sum = static_cast<double>(a) + b;
  if (sum != sum) return number_of(0x7fc00000u);
  if (std::isinf(sum)) return static_cast<float>(sum);
  const double part = sum - a, error = (a - (sum - part)) + (b - part);
  // The double's last bit says whether the exact sum has a rest beyond the double.
  if (error != 0 && (error < 0) != (sum < 0)) sum = std::nextafter(sum, 0.0);
  uint64_t bits = load_as<uint64_t>(&sum) | (error != 0);
  bits = (bits & ~uint64_t{0x1fffffff}) | (bits & 0x1fffffff ? uint64_t{1} << 29 : 0);
  const double odd = load_as<double>(&bits);
  if (std::fabs(odd) > FLT_MAX) return std::copysign(INFINITY, static_cast<float>(sum));
  return flushed(static_cast<float>(std::fabs(odd) < FLT_MIN ? std::copysign(0.0, odd) : odd));
}

// BFDOT: adds the sum of both products to `sum`. (With FPCR.EBF set, which no system does by itself, processors of
// ARMv9.2 round otherwise.)
inline float bfdot(float sum, uint32_t a, uint32_t b) {
  const auto product = [&](uint32_t x, uint32_t y) {  // exact
    return odd_sum(flushed(number_of(x)) * flushed(number_of(y)), 0.0f);
  };
  const float even = product(a << 16, b << 16), odd = product(a & 0xffff0000u, b & 0xffff0000u);
  return odd_sum(sum, odd_sum(even, odd));
}

struct Avx2Twin : FusedTwin<8> {
  static constexpr bool BYTES = true, GROUPS = true, DIGITS = true;
  static constexpr const char* NAME = "avx2-twin";
};

struct Avx512Twin : FusedTwin<16> {
  static constexpr bool BYTES = true, GROUPS = true, DIGITS = true, MANY_REGISTERS = true;
  static constexpr const char* NAME = "avx512-twin";
  static constexpr int TILE_ROWS = 8, SHORT_ROWS = 4;
  static constexpr int tile_vecs(int) { return 3; }
  static constexpr int short_vecs(int) { return 3; }
  static constexpr int attention_vecs(int) { return 4; }

  // VREDUCEPS, which rounds its difference down, and VSCALEFPS. (VRCP14PS has no twin: its estimate differs by less
  // than bfloat16 shows.)
  static Native fraction(Native x) {
    for (int i = 0; i < LANES; i++) {
      const double exact = static_cast<double>(x[i]) - std::floor(x[i]);
      const float near = static_cast<float>(exact);
      x[i] = std::isinf(x[i]) ? 0 : near > exact || near == 1 ? std::nextafter(near, 0.0f) : near;
    }
    return x;
  }
  static Native times_power(Native p, Native x) {
    for (int i = 0; i < LANES; i++)
      p[i] = x[i] == x[i] ? std::ldexp(p[i], std::fmin(std::fmax(std::floor(x[i]), -999.0f), 999.0f))
                          : x[i];
    return p;
  }
};

struct Avx512Bf16Twin : PairsTwin<Avx512Twin, vdpbf16ps> {
  static constexpr const char* NAME = "avx512-bf16-twin";

  static Halves narrow(Vec v) {
    for (int i = 0; i < LANES; i++) v[i] = flushed(v[i]);
    return Avx512Twin::narrow(v);
  }

  using Avx512Twin::add_weights;
  template <int COUNT>
  static void add_weights(Native (&x)[COUNT], float* sums, bf16* rounded) {
    Vec sum = load(sums);
    for (int j = 0; j < COUNT; j++) {
      Halves h = narrow(x[j]);
      std::memcpy(static_cast<void*>(rounded + j * LANES), &h, sizeof h);
      for (int i = 0; i < LANES; i += 2) {
        float& to = reinterpret_cast<float*>(&sum)[(j % 2 * LANES + i) / 2];
        to = vdpbf16ps(to, load_as<uint32_t>(rounded + j * LANES + i), 0x3f803f80u);
      }
    }
    store(sums, sum);
  }
};

struct NeonTwin : FusedTwin<4> {
  static constexpr const char* NAME = "neon-twin";
};

struct NeonBf16Twin : PairsTwin<NeonTwin, bfdot> {
  static constexpr bool BYTES = true;  // FEAT_BF16 comes with FEAT_DotProd
  static constexpr const char* NAME = "neon-bf16-twin";
};

}  // namespace rootlace
