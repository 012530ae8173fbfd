// AVX-512 (F, BW, DQ): 32 registers of 16 numbers; with BF16, products of pairs.
#pragma once

#include <immintrin.h>

#include "plain.h"

namespace rootlace {

struct Avx512 : Plain<16> {
  static constexpr const char* NAME = "avx512";

  static constexpr int TILE_ROWS = 8;
  static constexpr int tile_vecs(int) { return 3; }
  static constexpr int short_vecs(int) { return 3; }
  static constexpr int attention_vecs(int) { return 4; }

  static Native multiply_add(Native a, Native b, Native c) {
    return (Native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  static Native reciprocal(Native x) {
    Native guess = (Native)_mm512_rcp14_ps((__m512)x);
    return multiply_add(guess, multiply_add(-x, guess, splat(1.0f)), guess);
  }
  static Native fraction(Native x) {
    return (Native)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  }
  static Native times_power(Native p, Native x) {
    return (Native)_mm512_scalef_ps((__m512)p, (__m512)x);
  }

  static bool any_above(Native v, float limit) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
  }
  static uint32_t bits_of(Ints lanes) {
    __m512i all = reinterpret_cast<__m512i>(lanes);
    return _mm512_test_epi32_mask(all, all);
  }
  static Vec only(Vec v, uint32_t bits) {
    return (Vec)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), static_cast<__mmask16>(bits),
                                   (__m512)v);
  }

  static void split_bytes(const bf16* x, float steps, int8_t* high, int8_t* low) {
    const __m512 factor = _mm512_set1_ps(steps);
    __m512i numbers[4], upper[2], lower[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const __m512i bits = _mm512_cvtepu16_epi32(load_as<__m256i>(x + i * LANES));
      const __m512 some = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
      numbers[i] = _mm512_cvtps_epi32(_mm512_mul_ps(some, factor));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m512i both = _mm512_packs_epi32(numbers[2 * i], numbers[2 * i + 1]);
      upper[i] = _mm512_srai_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
      lower[i] = _mm512_and_si512(both, _mm512_set1_epi16(255));
    }
    // Instructions pack quarter by quarter: numbers[i] is in words i, 4 + i, 8 + i and 12 + i.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i first = _mm512_packs_epi16(upper[0], upper[1]);
    const __m512i second = _mm512_packus_epi16(lower[0], lower[1]);
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, first));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, second));
  }

  static constexpr bool BYTES = true;
#if defined(__AVX512VNNI__)
  // VPDPBUSD reads one factor as unsigned.
  static constexpr int BYTE_SHIFT = 128;
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_bytes(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(-BYTE_SHIFT));
    __m512i panel[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) panel[j] = _mm512_xor_si512(load_as<__m512i>(at(j)), shift);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const __m512i own = _mm512_set1_epi32(word(i));
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++)
        sums[i][j] = (Native)_mm512_dpbusd_epi32((__m512i)sums[i][j], panel[j], own);
    }
  }
#else
  // Multiplies even and odd bytes apart, as 16-bit integers.
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_bytes(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    const auto even = [](__m512i x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); };
    __m512i panel[2][COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const __m512i both = load_as<__m512i>(at(j));
      panel[0][j] = even(both), panel[1][j] = _mm512_srai_epi16(both, 8);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const __m512i own = _mm512_set1_epi32(word(i));
      const __m512i first = even(own), second = _mm512_srai_epi16(own, 8);
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
        const __m512i more = _mm512_add_epi32(_mm512_madd_epi16(panel[0][j], first),
                                              _mm512_madd_epi16(panel[1][j], second));
        sums[i][j] = (Native)_mm512_add_epi32((__m512i)sums[i][j], more);
      }
    }
  }
#endif

  static constexpr bool GROUPS = true, DIGITS = true, MANY_REGISTERS = true;
  static constexpr int SHORT_ROWS = 4;
  [[gnu::always_inline]] static NativeInts shorts(const void* p) {
    return (NativeInts)_mm512_cvtepi8_epi16(load_as<__m256i>(p));
  }
  // The highest digits need no mask.
  [[gnu::always_inline]] static NativeInts digits(const void* p, int digit) {
    return digit < 3 ? Plain::digits(p, digit) : (NativeInts)_mm512_srli_epi16(load_as<__m512i>(p), 12);
  }
  [[gnu::always_inline]] static NativeInts six_bits(const char* p, size_t row, int i) {
    if (i < 6) return Plain::six_bits(p, row, i);
    const __m512i low = _mm512_srli_epi16(load_as<__m512i>(p + (i - 6) * row), 12);
    const __m512i high = _mm512_srli_epi16(load_as<__m512i>(p + 2 * row), 2 * i - 4);
    return (NativeInts)_mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(0x30), 0xf8);
  }
  using ShortTable = __m512i;
  static ShortTable short_table(const float* numbers, int factor) {
    const auto integers = Plain::short_table(numbers, factor);
    return _mm512_broadcast_i64x4(load_as<__m256i>(integers.data()));
  }
  // The table is repeated, so the fifth bit of a place does not matter.
  [[gnu::always_inline]] static NativeInts look_up_shorts(ShortTable table, const void* p, int digit) {
    const __m512i places = _mm512_srli_epi16(load_as<__m512i>(p), 4 * digit);
    return (NativeInts)_mm512_permutexvar_epi16(places, table);
  }
  static int32_t put_shorts(const bf16* x, float steps, int16_t* to) {
    const __m512i numbers = short_numbers(x, steps);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(numbers));
    return _mm512_reduce_add_epi32(numbers);
  }
  template <int ROWS, int COLUMNS, class Word>
  [[gnu::always_inline]] static void add_shorts(NativeInts (&sums)[ROWS][COLUMNS],
                                                const NativeInts (&panel)[COLUMNS], Word&& word) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const __m512i own = _mm512_set1_epi32(word(i));
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
#if defined(__AVX512VNNI__)
        sums[i][j] = (NativeInts)_mm512_dpwssd_epi32((__m512i)sums[i][j], (__m512i)panel[j], own);
#else
        __m512i sum = _mm512_madd_epi16((__m512i)panel[j], own);
        sum = _mm512_add_epi32((__m512i)sums[i][j], sum);
        asm("" : "+v"(sum));  // as in avx2.h
        sums[i][j] = (NativeInts)sum;
#endif
      }
    }
  }

  using Table = Native;
  static Table table(const float* numbers) { return load_as<Native>(numbers); }
  [[gnu::always_inline]] static Native look_up(Table table, NativeWords places) {
    return (Native)_mm512_permutexvar_ps((__m512i)places, (__m512)table);
  }
  [[gnu::always_inline]] static void look_up_columns(const bf16* tables, const void* words,
                                                     bool borders, bf16* to) {
    const __m512i digits = load_as<__m512i>(words);
    const __m512i second = _mm512_maskz_set1_epi16(0xffff0000u, 16);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      __m512i places = _mm512_srli_epi16(digits, 4 * i);
      // The fifth bit chooses the half of the table; without `borders` both halves are equal.
      if (borders)
        places = _mm512_ternarylogic_epi32(places, _mm512_set1_epi16(15), second, 0xea);
      _mm512_storeu_si512(to + 32 * i,
                          _mm512_permutexvar_epi16(places, _mm512_loadu_si512(tables + 32 * i)));
    }
  }
  [[gnu::always_inline]] static Native rounded(Native x) {
    asm("" : "+v"(x));
    return x;
  }
  [[gnu::always_inline]] static Native from_int8(const void* p) {
    return (Native)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
  }
  [[gnu::always_inline]] static NativeInts from_uint8(const void* p) {
    return (NativeInts)_mm512_cvtepu8_epi32(load_as<__m128i>(p));
  }
  [[gnu::always_inline]] static NativeInts from_uint16(const void* p) {
    return (NativeInts)_mm512_cvtepu16_epi32(load_as<__m256i>(p));
  }
  [[gnu::always_inline]] static Native from_half(const void* p) {
    return (Native)_mm512_cvtph_ps(load_as<__m256i>(p));
  }
  // Converts by way of half precision, whose exponent bias is 8 larger.
  [[gnu::always_inline]] static Native from_e4m3(const void* p) {
    const __m256i bits = _mm256_cvtepu8_epi16(load_as<__m128i>(p));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
    const __m256i size = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x7f)), 7);
    return (Native)_mm512_cvtph_ps(_mm256_or_si256(sign, size)) * 256.0f;
  }
  static void twice(Vec from, float* to) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    store(to, (Vec)_mm512_permutexvar_ps(low, (__m512)from));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store(to + LANES, (Vec)_mm512_permutexvar_ps(high, (__m512)from));
  }

  static int interleave(const bf16* even, const bf16* odd, bf16* to, int count) {
    alignas(64) static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                 37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(LOW);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
      __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(to + 2 * i + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
    }
    return i + Plain::interleave(even + i, odd + i, to + 2 * i, count - i);
  }

  static void transpose16(const int32_t* const* rows, int column, int width, int32_t* out,
                          size_t stride) {
    __m512i r[16], t[16];
    const __mmask16 some = (__mmask16)((1u << width) - 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(some, rows[i] + column);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // r[4 a + c] holds, of rows 4a..4a+3, columns c, c + 4, c + 8 and c + 12 in its four quarters.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x44);
      t[4 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x44);
      t[8 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xee);
      t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      r[c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x88);
      r[4 + c] = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xdd);
      r[8 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x88);
      r[12 + c] = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xdd);
    }
    if (width == 16) {
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) _mm512_storeu_si512(out + j * stride, r[j]);
    } else {
      for (int j = 0; j < width; j++) _mm512_storeu_si512(out + j * stride, r[j]);
    }
  }

 private:
  static __m512i short_numbers(const bf16* x, float steps) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(x)), 16);
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(steps)));
  }
};

#if defined(__AVX512BF16__)
struct Avx512Bf16 : Avx512 {
  static constexpr const char* NAME = "avx512-bf16";

  static Halves narrow(Vec v) { return (Halves)_mm512_cvtneps_pbh((__m512)v); }

  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    __m512bh panel[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      panel[j] = load_as<__m512bh>(at(j));
      if (ROWS > 2) asm("" : "+v"(panel[j]));  // else GCC would load it again for each row
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      __m512bh pair = (__m512bh)_mm512_set1_epi32(word(i));
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++)
        sums[i][j] = (Native)_mm512_dpbf16_ps((__m512)sums[i][j], pair, panel[j]);
    }
  }

  template <int COUNT>
  [[gnu::always_inline]] static void narrow_row(bf16* to, const Native (&x)[COUNT]) {
    for (int j = 0; j < COUNT; j += 2) {
      __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)x[j + 1], (__m512)x[j]);
      std::memcpy(static_cast<void*>(to + j * LANES), &pairs, sizeof pairs);
    }
  }

  using Avx512::add_weights;
  template <int COUNT>
  static void add_weights(Native (&x)[COUNT], float* sums, bf16* rounded) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    __m512 sum = (__m512)load(sums);
    for (int j = 0; j < COUNT; j += 2) {
      __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)x[j + 1], (__m512)x[j]);
      std::memcpy(static_cast<void*>(rounded + j * LANES), &pairs, sizeof pairs);
      sum = _mm512_dpbf16_ps(sum, pairs, ones);
    }
    store(sums, (Vec)sum);
  }
};
using Isa = Avx512Bf16;
#else
using Isa = Avx512;
#endif

}  // namespace rootlace
