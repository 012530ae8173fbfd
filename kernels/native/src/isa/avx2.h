// AVX2: 16 registers of eight numbers.
#pragma once

#include <immintrin.h>

#include "plain.h"

namespace rootlace {

struct Avx2 : Plain<8> {
  static constexpr const char* NAME = "avx2";

  static Native multiply_add(Native a, Native b, Native c) {
    return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  static bool any_above(Native v, float limit) {
    return _mm256_movemask_ps((__m256)(v > limit)) != 0;
  }

  static Halves narrow(Vec v) {
    Native halves[2];
    std::memcpy(halves, &v, sizeof v);
    return (Halves)narrow(halves[0], halves[1]);
  }
  template <int COUNT>
  [[gnu::always_inline]] static void narrow_row(bf16* to, const Native (&x)[COUNT]) {
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j += 2)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * NATIVE), narrow(x[j], x[j + 1]));
  }

  static constexpr bool BYTES = true;
  // Multiplies even and odd bytes apart, as 16-bit integers.
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_bytes(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    const auto even = [](__m256i x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); };
    __m256i panel[2][COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) {
      const __m256i both = load_as<__m256i>(at(j));
      panel[0][j] = even(both), panel[1][j] = _mm256_srai_epi16(both, 8);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const __m256i own = _mm256_set1_epi32(word(i));
      const __m256i first = even(own), second = _mm256_srai_epi16(own, 8);
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
        const __m256i more = _mm256_add_epi32(_mm256_madd_epi16(panel[0][j], first),
                                              _mm256_madd_epi16(panel[1][j], second));
        sums[i][j] = (Native)_mm256_add_epi32((__m256i)sums[i][j], more);
      }
    }
  }

  static constexpr bool GROUPS = true, DIGITS = true;
  static constexpr int SHORT_SHIFT = 128;
  [[gnu::always_inline]] static NativeInts shorts(const void* p) {
    return (NativeInts)_mm256_cvtepi8_epi16(load_as<__m128i>(p));
  }
  // The highest bits of words need no mask.
  [[gnu::always_inline]] static NativeInts six_bits(const char* p, size_t row, int i) {
    if (i < 6) return Plain::six_bits(p, row, i);
    const __m256i low = _mm256_srli_epi16(load_as<__m256i>(p + (i - 6) * row), 12);
    const __m256i high = _mm256_srli_epi16(load_as<__m256i>(p + 2 * row), 2 * i - 4);
    return (NativeInts)_mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(0x30)));
  }
  // Table of 16 integers + SHORT_SHIFT, twice: as unsigned bytes, which zeros extend to 16 bits.
  using ShortTable = __m256i;
  static ShortTable short_table(const float* numbers, int factor) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++)
      bytes[i] = static_cast<uint8_t>(static_cast<int>(numbers[i] * factor) + SHORT_SHIFT);
    return _mm256_broadcastsi128_si256(load_as<__m128i>(bytes));
  }
  [[gnu::always_inline]] static NativeInts look_up_shorts(ShortTable table, const void* p, int digit) {
    const __m256i places = _mm256_or_si256((__m256i)digits(p, digit), _mm256_set1_epi16(-0x8000));
    return (NativeInts)_mm256_shuffle_epi8(table, places);
  }
  static int32_t put_shorts(const bf16* x, float steps, int16_t* to) {
    __m256i some[2];
    for (int i = 0; i < 2; i++) {
      const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(x + 8 * i)), 16);
      some[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(steps)));
    }
    const __m256i both = _mm256_packs_epi32(some[0], some[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
    const __m256i pairs = _mm256_madd_epi16(both, _mm256_set1_epi16(1));
    const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i twos = _mm_add_epi32(fours, _mm_shuffle_epi32(fours, 0x4e));
    return _mm_cvtsi128_si32(twos) + _mm_extract_epi32(twos, 1);
  }
  template <int ROWS, int COLUMNS, class Word>
  [[gnu::always_inline]] static void add_shorts(NativeInts (&sums)[ROWS][COLUMNS],
                                                const NativeInts (&panel)[COLUMNS], Word&& word) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      const __m256i own = _mm256_set1_epi32(word(i));
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) {
        __m256i sum = _mm256_madd_epi16((__m256i)panel[j], own);
        sum = _mm256_add_epi32((__m256i)sums[i][j], sum);
        asm("" : "+x"(sum));  // else GCC would reorder the additions, which takes more registers
        sums[i][j] = (NativeInts)sum;
      }
    }
  }

  struct Table {
    __m256 low, high;
  };
  static Table table(const float* numbers) {
    return {_mm256_loadu_ps(numbers), _mm256_loadu_ps(numbers + 8)};
  }
  [[gnu::always_inline]] static Native look_up(const Table& table, NativeWords places) {
    const __m256i at = (__m256i)places;
    const __m256 low = _mm256_permutevar8x32_ps(table.low, at);
    const __m256 high = _mm256_permutevar8x32_ps(table.high, at);
    return (Native)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
  }
  [[gnu::always_inline]] static Native from_int8(const void* p) {
    const __m128i bytes = _mm_cvtsi64_si128(load_as<int64_t>(p));
    return (Native)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  [[gnu::always_inline]] static NativeInts from_uint8(const void* p) {
    return (NativeInts)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_as<int64_t>(p)));
  }
  [[gnu::always_inline]] static Native from_half(const void* p) {
    return (Native)_mm256_cvtph_ps(load_as<__m128i>(p));
  }
  [[gnu::always_inline]] static Native from_e4m3(const void* p) {
    return from_float<3, 7>(from_uint8(p), 0x80);
  }
  [[gnu::always_inline]] static Native rounded(Native x) {
    asm("" : "+x"(x));
    return x;
  }

  static uint32_t bits_of(Ints lanes) {
    __m256 halves[2];
    std::memcpy(halves, &lanes, sizeof lanes);
    return static_cast<uint32_t>(_mm256_movemask_ps(halves[0])) |
           static_cast<uint32_t>(_mm256_movemask_ps(halves[1])) << 8;
  }

 private:
  // Rounds to bfloat16, ties to even; NaN stays NaN.
  [[gnu::always_inline]] static __m256i narrow(Native low, Native high) {
    const auto upper = [](Native x) {
      const __m256i bits = (__m256i)x, kept = _mm256_srli_epi32(bits, 16);
      const __m256i odd = _mm256_and_si256(kept, _mm256_set1_epi32(1));
      const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
      const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
      const __m256i quiet = _mm256_or_si256(kept, _mm256_set1_epi32(0x40));
      const __m256 is_nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
      return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(is_nan));
    };
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(upper(low), upper(high)), 0xd8);
  }
};
using Isa = Avx2;

}  // namespace rootlace
