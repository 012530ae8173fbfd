// Functions of every instruction set, in the compilers' vector extension. A set derives from `Plain` and hides the
// functions for which it has better instructions; see isa.h.
#pragma once

#include <array>

#include "vector.h"

#if defined(__clang__)
#define ROOTLACE_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define ROOTLACE_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Four{i, j, k, l})
#endif

namespace rootlace {

// Registers of WIDTH float32 numbers, written out: in GCC 12 no vector's size can depend on a template argument.
template <int WIDTH>
struct Registers;
#define ROOTLACE_REGISTERS(WIDTH)                                         \
  template <>                                                             \
  struct Registers<WIDTH> {                                               \
    typedef float Native __attribute__((vector_size(WIDTH * 4)));         \
    typedef int32_t NativeInts __attribute__((vector_size(WIDTH * 4)));   \
    typedef uint32_t NativeWords __attribute__((vector_size(WIDTH * 4))); \
    typedef uint16_t NativeHalves __attribute__((vector_size(WIDTH * 2))); \
    typedef int16_t NativeShorts __attribute__((vector_size(WIDTH * 2))); \
    typedef int8_t SignedBytes __attribute__((vector_size(WIDTH)));       \
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));            \
  }
ROOTLACE_REGISTERS(4);
ROOTLACE_REGISTERS(8);
ROOTLACE_REGISTERS(16);
#undef ROOTLACE_REGISTERS

// WIDTH: float32 numbers of a register. Sums are such registers, because compilers keep a `Vec` of 16 lanes in memory
// where registers are smaller.
template <int WIDTH>
struct Plain {
  static constexpr int NATIVE = WIDTH;
  using Native = typename Registers<WIDTH>::Native;
  using NativeInts = typename Registers<WIDTH>::NativeInts;

  // Most rows of a tile; most vectors of a tile of `rows` rows whose sums fit in registers; the same for attention.
  static constexpr int TILE_ROWS = 6;
  static constexpr int tile_vecs(int rows) { return rows <= 2 ? 3 : rows <= 3 ? 2 : 1; }
  static constexpr int attention_vecs(int rows) { return tile_vecs(rows); }

  using NativeWords = typename Registers<WIDTH>::NativeWords;

  static Native splat(float x) { return x - Native{}; }
  static Native multiply_add(Native a, Native b, Native c) { return a * b + c; }
  // 1 / x of normal numbers, to about 1e-7.
  static Native reciprocal(Native x) { return 1.0f / x; }

  // Parts of 2^x = 2^fraction 2^floor(x): `fraction` is x - floor(x), `times_power` is p 2^floor(x).
  static Native fraction(Native x) { return clamped(x) - (shifted(x) - 12582912.0f); }
  static Native times_power(Native p, Native x) {
    NativeInts bits = (NativeInts)p + ((NativeInts)shifted(x) << 23);
    return x < -126.0f ? Native{} : (Native)bits;
  }

  // Whether a lane of v is above `limit`.
  static bool any_above(Native v, float limit) {
    NativeInts above = v > limit;
    int64_t words[WIDTH / 2], any = 0;
    std::memcpy(words, &above, sizeof above);
    for (int64_t word : words) any |= word;
    return any != 0;
  }

  // Bit i says whether lane i of a comparison's result holds.
  static uint32_t bits_of(Ints lanes) {
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= static_cast<uint32_t>(lanes[i] != 0) << i;
    return bits;
  }

  // Returns v where the bits (of 16) are set, minus infinity elsewhere.
  static Vec only(Vec v, uint32_t bits) {
    Ints lane = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    Ints allowed = (lane & (static_cast<int32_t>(bits) - Ints{})) != 0;
    return allowed ? v : rootlace::splat(-INFINITY);
  }

  // Rounds to nearest, ties to even. NaN stays NaN.
  static Halves narrow(Vec v) {
    Words w = reinterpret_cast<Words>(v);
    Words rounded = (w + 0x7fff + ((w >> 16) & 1)) >> 16;
    Words quiet = (w >> 16) | 0x40;
    Words is_nan = reinterpret_cast<Words>(v != v);
    return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), Halves);
  }

  // Sets to[2 i], to[2 i + 1] = even[i], odd[i] for i below `count` rounded down to whole vectors; returns that number.
  static int interleave(const bf16* even, const bf16* odd, bf16* to, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
      Words low = __builtin_convertvector(load_as<Halves>(even + i), Words);
      Words high = __builtin_convertvector(load_as<Halves>(odd + i), Words);
      Words both = low | high << 16;
      std::memcpy(static_cast<void*>(to + 2 * i), &both, sizeof both);
    }
    return i;
  }

  // Transposes a 16 x 16 matrix of 32-bit words. Row i begins at rows[i] + column; only its first `width` columns are
  // read. Row j of the result is at out + j * stride.
  static void transpose16(const int32_t* const* rows, int column, int width, int32_t* out,
                          size_t stride) {
    typedef int32_t Four __attribute__((vector_size(16)));
    for (int i = 0; i < 16; i += 4) {
      const int32_t* p[4];
      for (int k = 0; k < 4; k++) p[k] = rows[i + k] + column;
      int j = 0;
      for (; j + 4 <= width; j += 4) {
        Four r[4];
        for (int k = 0; k < 4; k++) r[k] = load_as<Four>(p[k] + j);
        Four a = ROOTLACE_SHUFFLE(r[0], r[1], 0, 4, 1, 5);
        Four b = ROOTLACE_SHUFFLE(r[2], r[3], 0, 4, 1, 5);
        Four c = ROOTLACE_SHUFFLE(r[0], r[1], 2, 6, 3, 7);
        Four d = ROOTLACE_SHUFFLE(r[2], r[3], 2, 6, 3, 7);
        r[0] = ROOTLACE_SHUFFLE(a, b, 0, 1, 4, 5);
        r[1] = ROOTLACE_SHUFFLE(a, b, 2, 3, 6, 7);
        r[2] = ROOTLACE_SHUFFLE(c, d, 0, 1, 4, 5);
        r[3] = ROOTLACE_SHUFFLE(c, d, 2, 3, 6, 7);
        for (int k = 0; k < 4; k++) std::memcpy(out + (j + k) * stride + i, &r[k], sizeof(Four));
      }
      for (; j < width; j++)
        for (int k = 0; k < 4; k++) out[j * stride + i + k] = p[k][j];
    }
  }

  // Whether tiles of `rows` rows take two steps of pairs at once (`add_quads`), with the same bits. Their sums are then
  // in another order; `reorder` changes to it and back.
  static constexpr bool has_quads(int) { return false; }
  template <int ROWS, int COLUMNS>
  static void reorder(Native (&)[ROWS][COLUMNS]) {}
  template <int ROWS, int COLUMNS, class Panel, class Words>
  static void add_quads(Native (&)[ROWS][COLUMNS], Panel, Panel, Words&&) {}

  // sums += a number of each row x a panel's row, whose registers lie at(column).
  template <int ROWS, int COLUMNS, class Panel, class Number>
  [[gnu::always_inline]] static void add_numbers(Native (&sums)[ROWS][COLUMNS], Panel at,
                                                 Number&& number) {
    Native panel[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) panel[j] = load_as<Native>(at(j));
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) sums[i][j] += number(i) * panel[j];
  }

  // sums += a pair of bfloat16 of each row, word(row), x a panel's row of pairs: all odd numbers, then all even ones,
  // which takes fewer registers.
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_pairs(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    add_halves<true>(sums, at, word);
    add_halves<false>(sums, at, word);
  }

  // The same for one number of each pair. A bfloat16 is the upper half of a float32.
  template <bool ODD, int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_halves(Native (&sums)[ROWS][COLUMNS], Panel at,
                                                Word&& word) {
    Native panel[COLUMNS];
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) panel[j] = half<ODD>(load_as<NativeInts>(at(j)));
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++) {
      float own = to_float(bf16{static_cast<uint16_t>(static_cast<uint32_t>(word(i)) >> 16 * ODD)});
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++) sums[i][j] += own * panel[j];
    }
  }
  template <bool ODD>
  [[gnu::always_inline]] static Native half(NativeInts pairs) {
    return (Native)(ODD ? pairs & static_cast<int32_t>(0xffff0000u) : pairs << 16);
  }

  // Whether products of int8 are faster than products of the numbers that the integers stand for.
  static constexpr bool BYTES = false;

  // sums += four int8 of each row, word(row), x a panel's row of words. `sums` are registers with the bits of int32. If
  // the panel's integers are read as larger by BYTE_SHIFT, a sum is too large by BYTE_SHIFT times the sum of the row.
  static constexpr int BYTE_SHIFT = 0;
  template <int ROWS, int COLUMNS, class Panel, class Word>
  [[gnu::always_inline]] static void add_bytes(Native (&sums)[ROWS][COLUMNS], Panel at,
                                               Word&& word) {
    for (int k = 0; k < 4; k++) {
      NativeInts panel[COLUMNS];
#pragma GCC unroll 16
      for (int j = 0; j < COLUMNS; j++)
        panel[j] = load_as<NativeInts>(at(j)) << (24 - 8 * k) >> 24;
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) {
        const int32_t own = static_cast<int8_t>(word(i) >> 8 * k);
#pragma GCC unroll 16
        for (int j = 0; j < COLUMNS; j++)
          sums[i][j] = (Native)((NativeInts)sums[i][j] + panel[j] * own);
      }
    }
  }

  // GROUPS: whether products of 16-bit integers with `grouped` codes (../codes.h) are faster. `shorts` reads pairs of
  // 8-bit codes, `digits` the digit-th pair of 4-bit codes of words, `six_bits` the i-th pair of a chunk's 6-bit codes.
  // `look_up_shorts` replaces digits by numbers of a table, plus SHORT_SHIFT. DIGITS: whether `digits` is faster than
  // that. MANY_REGISTERS: whether registers can hold a tile's sums twice.
  static constexpr bool GROUPS = false, DIGITS = false, MANY_REGISTERS = false;
  static constexpr int SHORT_SHIFT = 0;
  static constexpr int SHORT_ROWS = 5;  // of a tile
  static constexpr int short_vecs(int rows) { return rows == 1 ? 3 : rows == 2 ? 2 : 1; }
  static NativeInts shorts(const void* p) {
    const auto bytes = load_as<std::array<int8_t, WIDTH * 2>>(p);
    return pairs([&](int i) { return bytes[i]; });
  }
  static NativeInts digits(const void* p, int digit) {
    return load_as<NativeInts>(p) >> 4 * digit & 0x000f000f;
  }
  static NativeInts six_bits(const char* p, size_t row, int i) {
    if (i < 6) return load_as<NativeInts>(p + i / 2 * row) >> 6 * (i % 2) & 0x003f003f;
    const NativeInts high = load_as<NativeInts>(p + 2 * row) >> (2 * i - 4) & 0x00300030;
    return (load_as<NativeInts>(p + (i - 6) * row) >> 12 & 0x000f000f) | high;
  }
  using ShortTable = std::array<int16_t, 16>;
  static ShortTable short_table(const float* numbers, int factor) {
    ShortTable table;
    for (int i = 0; i < 16; i++) table[i] = static_cast<int16_t>(numbers[i] * factor);
    return table;
  }
  static NativeInts look_up_shorts(const ShortTable& table, const void* p, int digit) {
    const auto words = load_as<std::array<uint16_t, WIDTH * 2>>(p);
    return pairs([&](int i) { return table[words[i] >> 4 * digit & 15]; });
  }
  template <int ROWS, int COLUMNS, class Word>
  static void add_shorts(NativeInts (&sums)[ROWS][COLUMNS], const NativeInts (&panel)[COLUMNS],
                         Word&& word) {
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < COLUMNS; j++)
        sums[i][j] += (panel[j] << 16 >> 16) * static_cast<int16_t>(word(i)) +
                      (panel[j] >> 16) * (word(i) >> 16);
  }
  template <class Number>
  static NativeInts pairs(Number&& number) {
    std::array<int16_t, WIDTH * 2> all;
    for (int i = 0; i < WIDTH * 2; i++) all[i] = number(i);
    return load_as<NativeInts>(all.data());
  }

  // Writes 16 numbers times `steps`, rounded to the nearest integers; returns their sum.
  static int32_t put_shorts(const bf16* x, float steps, int16_t* to) {
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) {
      // The last 16 bits of 1.5 * 2^23 + n are n; ties to even.
      const NativeInts bits = (NativeInts)(rounded(splat(to_float(x[i]) * steps)) + 12582912.0f);
      sum += to[i] = static_cast<int16_t>(bits[0]);
    }
    return sum;
  }

  // Rounds 64 numbers times `steps` to the nearest integers n = 256 high + low.
  static void split_bytes(const bf16* x, float steps, int8_t* high, int8_t* low) {
    using Shorts = typename Registers<WIDTH>::NativeShorts;
    using Bytes = typename Registers<WIDTH>::SignedBytes;
    for (int i = 0; i < 64; i += WIDTH) {
      Native some;
      for (int lane = 0; lane < WIDTH; lane++) some[lane] = to_float(x[i + lane]);
      // The last 16 bits of 1.5 * 2^23 + n are n; ties to even.
      const NativeInts sum = (NativeInts)(rounded(some * steps) + 12582912.0f);
      const Shorts numbers = __builtin_convertvector(sum, Shorts);
      const Bytes upper = __builtin_convertvector((numbers + 128) >> 8, Bytes);
      const Bytes lower = __builtin_convertvector(numbers, Bytes);
      std::memcpy(high + i, &upper, sizeof upper);
      std::memcpy(low + i, &lower, sizeof lower);
    }
  }

  // Table of 16 numbers; `look_up` returns those whose places are the lanes' last four bits.
  struct Table {
    float at[16];
  };
  static Table table(const float* numbers) { return load_as<Table>(numbers); }
  [[gnu::always_inline]] static Native look_up(const Table& table, NativeWords places) {
    Native x;
    for (int i = 0; i < WIDTH; i++) x[i] = table.at[places[i] & 15];
    return x;
  }

  // Looks up 32 numbers for each of four columns. A digit of each word, the first column's the lowest, is the place in
  // the column's table. Either half of the words has its own half of the table; without `borders` both are equal.
  static void look_up_columns(const bf16* tables, const void* words, bool, bf16* to) {
    uint16_t digits[32];
    std::memcpy(digits, words, sizeof digits);
    for (int column = 0; column < 4; column++)
      for (int i = 0; i < 32; i++) {
        const int place = (i & 16) | (digits[i] >> 4 * column & 15);
        to[32 * column + i] = tables[32 * column + place];
      }
  }

  // Keeps compilers from fusing a product with a later addition: the product is rounded alone.
  [[gnu::always_inline]] static Native rounded(Native x) {
    asm("" : "+m"(x));
    return x;
  }

  // Converts in steps: GCC 12 converts number by number if the sizes differ by more than a factor of two.
  [[gnu::always_inline]] static Native from_int8(const void* p) {
    using Shorts = typename Registers<WIDTH>::NativeShorts;
    const auto bytes = load_as<typename Registers<WIDTH>::SignedBytes>(p);
    const NativeInts all =
        __builtin_convertvector(__builtin_convertvector(bytes, Shorts), NativeInts);
    return __builtin_convertvector(all, Native);
  }
  [[gnu::always_inline]] static NativeInts from_uint8(const void* p) {
    using Halves = typename Registers<WIDTH>::NativeHalves;
    const auto bytes = load_as<typename Registers<WIDTH>::Bytes>(p);
    return __builtin_convertvector(__builtin_convertvector(bytes, Halves), NativeInts);
  }
  [[gnu::always_inline]] static NativeInts from_uint16(const void* p) {
    using Halves = typename Registers<WIDTH>::NativeHalves;
    return __builtin_convertvector(load_as<Halves>(p), NativeInts);
  }
  // E4M3: sign, four bits of exponent (bias 7), three of fraction; not for NaN.
  [[gnu::always_inline]] static Native from_e4m3(const void* p) {
    return from_float<3, 7>(from_uint8(p), 0x80);
  }
  // Half precision: sign, five bits of exponent (bias 15), ten of fraction; for finite numbers.
  [[gnu::always_inline]] static Native from_half(const void* p) {
    const auto bits = load_as<typename Registers<WIDTH>::NativeHalves>(p);
    return from_float<10, 15>(__builtin_convertvector(bits, NativeInts), 0x8000);
  }
  // Converts subnormal numbers as integers: as float32 they would be subnormal, too, which is slow.
  template <int FRACTION, int BIAS>
  [[gnu::always_inline]] static Native from_float(NativeInts bits, int32_t sign) {
    const NativeInts size = bits & (sign - 1);
    const Native normal = (Native)((size << (23 - FRACTION)) + ((127 - BIAS) << 23));
    const Native least = splat(1.0f / (1 << (BIAS - 1 + FRACTION)));
    const NativeInts small = (NativeInts)(__builtin_convertvector(size, Native) * least);
    const NativeInts chosen = size < (1 << FRACTION) ? small : (NativeInts)normal;
    return (Native)(chosen | ((bits & sign) != 0) << 31);
  }

  // to[2 i], to[2 i + 1] = from[i].
  static void twice(Vec from, float* to) {
    for (int i = 0; i < 2 * LANES; i++) to[i] = from[i / 2];
  }

  // Stores a row of numbers, rounded as by `narrow`.
  template <int COUNT>
  [[gnu::always_inline]] static void narrow_row(bf16* to, const Native (&x)[COUNT]) {
    using NativeHalves = typename Registers<WIDTH>::NativeHalves;
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) {
      NativeHalves halves = __builtin_convertvector(upper_half(x[j]), NativeHalves);
      std::memcpy(static_cast<void*>(to + j * WIDTH), &halves, sizeof halves);
    }
  }

  // sums[LANES] += x, lane by lane.
  template <int COUNT>
  static void add_weights(const Native (&x)[COUNT], float* sums) {
    constexpr int PARTS = LANES / WIDTH;
    static_assert(COUNT == 4 * PARTS);
    for (int i = 0; i < PARTS; i++) {
      Native sum = load_as<Native>(sums + i * WIDTH);
      sum += (x[i] + x[PARTS + i]) + (x[2 * PARTS + i] + x[3 * PARTS + i]);
      std::memcpy(sums + i * WIDTH, &sum, sizeof sum);
    }
  }

  // The same for x rounded to bfloat16; stores that in `rounded`.
  template <int COUNT>
  static void add_weights(Native (&x)[COUNT], float* sums, bf16* rounded) {
    using NativeHalves = typename Registers<WIDTH>::NativeHalves;
    for (int j = 0; j < COUNT; j++) {
      const NativeWords upper = upper_half(x[j]);
      x[j] = (Native)(upper << 16);
      NativeHalves halves = __builtin_convertvector(upper, NativeHalves);
      std::memcpy(static_cast<void*>(rounded + j * WIDTH), &halves, sizeof halves);
    }
    add_weights(x, sums);
  }

 private:
  // Rounds numbers to bfloat16, as words.
  [[gnu::always_inline]] static NativeWords upper_half(Native x) {
    const NativeWords bits = (NativeWords)x;
    const NativeWords upper = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? upper : (bits >> 16) | 0x40;
  }
  static Native clamped(Native x) {
    Native least = x < -126.0f ? splat(-126.0f) : x;
    return least > 128.0f ? splat(128.0f) : least;
  }
  // Returns 1.5 * 2^23 + floor(x), whose last bits are floor(x).
  static Native shifted(Native x) { return clamped(x) - 0.5f + 12582912.0f; }
};

}  // namespace rootlace

#undef ROOTLACE_SHUFFLE
