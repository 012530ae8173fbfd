// ARM's NEON: 32 registers of four numbers; with BF16 (ARMv8.6), products of pairs.
#pragma once

#include <arm_neon.h>

#include "plain.h"

namespace rootlace {

// Tiles have up to 24 registers of sums. With more columns than rows, a number of each row is kept in registers and
// columns are read one by one; else the other way round.
struct Neon : Plain<4> {
  static constexpr const char* NAME = "neon";

  static Native multiply_add(Native a, Native b, Native c) {
    return (Native)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  }

#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr bool BYTES = true;
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_bytes(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const int8x16_t panel = load_as<int8x16_t>(at(j));
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++)
        sums[i][j] = (Native)vdotq_s32((int32x4_t)sums[i][j], panel, (int8x16_t)vdupq_n_s32(word(i)));
    }
  }
#endif

  using Table = uint8x16x4_t;
  static Table table(const float* numbers) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(numbers);
    return {{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}};
  }
  [[gnu::always_inline]] static Native look_up(const Table& table, NativeWords places) {
    // A number is four bytes of the table.
    const NativeWords bytes = (places & 15) * 0x04040404u + 0x03020100u;
    return (Native)vqtbl4q_u8(table, (uint8x16_t)bytes);
  }
  [[gnu::always_inline]] static Native rounded(Native x) {
    asm("" : "+w"(x));
    return x;
  }

  template <int ROWS, int COLUMNS, class Panel, class Number>
  [[gnu::always_inline]] static void add_numbers(Native (&sums)[ROWS][COLUMNS], Panel at,
                                                 Number&& number) {
    if constexpr (COLUMNS <= ROWS) return Plain::add_numbers(sums, at, number);
    float32x2_t a[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) a[i] = vset_lane_f32(number(i), vdup_n_f32(0), 0);
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const Native panel = load_as<Native>(at(j));
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) sums[i][j] = vfmaq_lane_f32(sums[i][j], panel, a[i], 0);
    }
  }

  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    add_halves<true>(sums, at, word);
    asm volatile("" ::: "memory");  // else the panel would be kept in registers
    add_halves<false>(sums, at, word);
  }

  template <bool ODD, int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_halves(Native (&sums)[ROWS][COLUMNS], Panel at,
                                                Word&& word) {
    if constexpr (COLUMNS <= ROWS) return Plain::add_halves<ODD>(sums, at, word);
    float32x2_t a[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const uint32_t pair = static_cast<uint32_t>(word(i));
      a[i] = vcreate_f32(ODD ? pair & 0xffff0000u : pair << 16);
    }
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const Native panel = half<ODD>(load_as<NativeInts>(at(j)));
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) sums[i][j] = vfmaq_lane_f32(sums[i][j], panel, a[i], 0);
    }
  }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
struct NeonBf16 : Neon {
  static constexpr const char* NAME = "neon-bf16";

  static Halves narrow(Vec v) {
    float32x4_t parts[4];
    std::memcpy(parts, &v, sizeof v);
    bfloat16x8_t low = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(parts[0]), parts[1]);
    bfloat16x8_t high = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(parts[2]), parts[3]);
    Halves h;
    std::memcpy(&h, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&h) + sizeof low, &high, sizeof high);
    return h;
  }

  template <int COUNT>
  [[gnu::always_inline]] static void narrow_row(bf16* to, const Native (&x)[COUNT]) {
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j += 2) {
      const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)x[j]);
      const bfloat16x8_t both = vcvtq_high_bf16_f32(low, (float32x4_t)x[j + 1]);
      std::memcpy(static_cast<void*>(to + j * NATIVE), &both, sizeof both);
    }
  }

  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    constexpr bool BY_COLUMN = COLUMNS > ROWS;
    bfloat16x4_t a[ROWS];
    bfloat16x8_t panel[COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; BY_COLUMN && i < ROWS; i++) a[i] = pair(word(i));
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      panel[j] = load_as<bfloat16x8_t>(at(j));
#pragma GCC unroll 16
      for (int i = 0; BY_COLUMN && i < ROWS; i++)
        sums[i][j] = vbfdotq_lane_f32(sums[i][j], panel[j], a[i], 0);
    }
    if (BY_COLUMN) return;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      a[i] = pair(word(i));
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++)
        sums[i][j] = vbfdotq_lane_f32(sums[i][j], panel[j], a[i], 0);
    }
  }

  // BFMMLA multiplies two rows by two columns, four numbers deep, with the sums of two BFDOT in their order (Arm's
  // manual, BFMatMulAdd). A register has the sums of rows i and i + 1 for two columns. An odd last row uses BFDOT.
  // With fewer than four rows, combining two panel rows costs as much as BFMMLA saves.
  static constexpr bool has_quads(int rows) { return rows >= 4; }

  template <int ROWS, int COLUMNS>
  [[gnu::always_inline]] static void reorder(Native (&sums)[ROWS][COLUMNS]) {
#pragma GCC unroll 16
    for (int i = 0; i + 1 < ROWS; i += 2)
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
        const float64x2_t a = (float64x2_t)sums[i][j], b = (float64x2_t)sums[i + 1][j];
        sums[i][j] = (Native)vzip1q_f64(a, b);
        sums[i + 1][j] = (Native)vzip2q_f64(a, b);
      }
  }

  // words(row): address of the row's two pairs.
  template <int ROWS, int COLUMNS, class Panel, class Words>
  [[gnu::always_inline]] static void add_quads(Native (&sums)[ROWS][COLUMNS], Panel first,
                                               Panel second, Words&& words) {
    bfloat16x8_t a[(ROWS + 1) / 2];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i += 2)
      a[i / 2] = vcombine_bf16(load_as<bfloat16x4_t>(words(i)),
                               load_as<bfloat16x4_t>(words(i + 1 < ROWS ? i + 1 : i)));
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const uint32x4_t pairs = load_as<uint32x4_t>(first(j)), next = load_as<uint32x4_t>(second(j));
      const bfloat16x8_t low = (bfloat16x8_t)vzip1q_u32(pairs, next);
      const bfloat16x8_t high = (bfloat16x8_t)vzip2q_u32(pairs, next);
#pragma GCC unroll 16
      for (int i = 0; i + 1 < ROWS; i += 2) {
        sums[i][j] = vbfmmlaq_f32(sums[i][j], a[i / 2], low);
        sums[i + 1][j] = vbfmmlaq_f32(sums[i + 1][j], a[i / 2], high);
      }
      if constexpr (ROWS % 2) {
        Native& sum = sums[ROWS - 1][j];
        sum = vbfdotq_laneq_f32(sum, (bfloat16x8_t)pairs, a[ROWS / 2], 0);
        sum = vbfdotq_laneq_f32(sum, (bfloat16x8_t)next, a[ROWS / 2], 1);
      }
    }
  }

 private:
  [[gnu::always_inline]] static bfloat16x4_t pair(int32_t word) {
    return vcreate_bf16(static_cast<uint32_t>(word));
  }
};
using Isa = NeonBf16;
#else
using Isa = Neon;
#endif

}  // namespace rootlace
