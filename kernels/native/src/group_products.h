// Products of 16-bit integers with codes that have scales per group of inputs (`CodeLayout::grouped`).
//
// A row of x is integers n (short_rows.h). For each run of at most MOST_SUMMED inputs of a group, in order, the sum
// of n * code is exact. Then, in float32, each rounded once:
//     y += sum * scale, and at the group's end y += (sum of the group's n) * offset.
// At the end y is multiplied by the row's scale. So a row's bits do not depend on other rows.
#pragma once

#include <algorithm>
#include <utility>

#include "codes.h"
#include "short_rows.h"
#include "vec.h"

namespace rootlace {

// Inputs whose products with 8-bit integers are summed in 32 bits. With APART (below), half of the inputs are
// multiplied by digits sixteen times as large; those sums fit, too.
constexpr int MOST_SUMMED = 512;
static_assert(int64_t{MOST_SUMMED} * RowScale::LARGEST * 128 <= INT32_MAX);
static_assert(int64_t{MOST_SUMMED / 2} * RowScale::LARGEST * (15 << 4) <= INT32_MAX);

// Stretch of a panel: some of its groups, in whole units.
struct GroupStretch {
  const CodeLayout& layout;
  const char* at;    // address of the first unit
  int vec;           // the first vector
  int first, count;  // first group, number of groups

  // Calls use(unit, group in the unit, group's first chunk, its end, run's first chunk, its end) for each run of at
  // most MOST_SUMMED inputs of a group. (As fields of a structure, the numbers slow GCC's loops by a fifth.)
  template <class Use>
  [[gnu::always_inline]] void each(Use&& use) const {
    const int groups = layout.scheme.unit_groups;
    int chunk = first * layout.group_chunks;
    for (int unit = 0, left = count; left > 0; unit++)
      for (int group = 0; group < groups && left > 0; group++, left--)
        for (int begin = chunk, end = std::min(chunk + layout.group_chunks, layout.chunks); chunk < end;) {
          const int run = chunk;
          chunk = std::min(chunk + MOST_SUMMED / CHUNK, end);
          use(unit, group, begin, end, run, chunk);
        }
  }
};

// Rows of x as ShortRows has them; `sums_at`: place of the prefix sums in a row.
struct ShortTile {
  const int16_t* x;
  size_t stride;
  int sums_at;

  // Returns the sum of a row's integers in the chunks begin : end.
  int32_t sum(int row, int begin, int end) const {
    const char* before = reinterpret_cast<const char*>(x + row * stride + sums_at);
    return load_as<int32_t>(before + end * 4) - load_as<int32_t>(before + begin * 4);
  }
};

namespace detail {

// Returns the most rows of a tile of `vecs` vectors.
constexpr int group_rows(int vecs) {
  int rows = Isa::SHORT_ROWS;
  while (Isa::short_vecs(rows) < vecs) rows--;
  return rows;
}

// Ways to make 16-bit integers of codes.
enum class Shorts { BYTES, DIGITS, LOOKED_UP, SIX_BITS };

// Adds a stretch's products to sums[ROWS, VECS * 16], rows `lds` apart; the first stretch replaces the sums.
// `least` is added to each unpacked integer. `factor`, a power of two, multiplies scales. `scale_at`: place of a
// row's own scale in the row, which multiplies the sums after the last stretch; else 0.
template <Shorts KIND, int ROWS, int VECS>
void multiply_stretch(const GroupStretch& stretch, const ShortTile& tile, int least, float factor,
                      int scale_at, float* sums, size_t lds) {
  // ROWS_TOGETHER rows of codes hold TOGETHER of a chunk's WORDS words. A row of words has COUNT registers.
  constexpr bool FULL_WORDS = KIND != Shorts::BYTES;
  constexpr int WORDS = CHUNK / SHORT_WORD, ROWS_TOGETHER = KIND == Shorts::SIX_BITS ? 3 : 1;
  constexpr int TOGETHER = KIND == Shorts::SIX_BITS ? WORDS : FULL_WORDS ? 4 : 1;
  constexpr int PER = LANES / NATIVE, COUNT = VECS * PER;
  constexpr int REGISTER = NATIVE * (FULL_WORDS ? 4 : SHORT_WORD);  // bytes
  const CodeLayout& layout = stretch.layout;
  const RlScheme& scheme = layout.scheme;
  const bool has_offsets = scheme.offsets != RL_NO_NUMBERS;
  const size_t row_bytes = layout.vecs * layout.word_bytes(), stride = tile.stride;
  typename Isa::ShortTable table;
  if constexpr (KIND == Shorts::LOOKED_UP) table = Isa::short_table(scheme.table, layout.whole);
  // Computes to = times * numbers in a unit's heads; `at` is the first vector's.
  const auto numbers = [&](int32_t kind, const char* at, const Native* times,
                           Native* to) __attribute__((always_inline)) {
    with_numbers(kind, [&](auto load) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; j++)
        to[j] = load(at + j / PER * layout.head_bytes + j % PER * NATIVE * size_of(kind)) * times[j];
    });
  };
  Native own_sums[ROWS][COUNT] = {}, (*all)[COUNT] = own_sums;
  if (!Isa::MANY_REGISTERS) asm("" : "+r"(all) : : "memory");
  if (stretch.first)
    for (int i = 0; i < ROWS; i++) std::memcpy(all[i], sums + i * lds, sizeof own_sums[i]);
  // Factors of scales and of offsets, in memory because sums take the registers.
  Native ones[2][COUNT], in_memory[2][COUNT];
  for (int j = 0; j < COUNT; j++) {
    ones[0][j] = in_memory[0][j] = Isa::splat(factor);
    ones[1][j] = in_memory[1][j] = Isa::splat(1.0f);
  }
  Native(*units)[COUNT] = in_memory;
  asm("" : "+r"(units) : : "memory");
  const char* rows[ROWS];
  for (int i = 0; i < ROWS; i++) {
    rows[i] = reinterpret_cast<const char*>(tile.x + i * stride);
    asm("" : "+r"(rows[i]));  // else GCC would keep an address for each word of each row
  }
  const size_t unit_bytes = layout.unit_bytes();
  const size_t first_scales = layout.scales_at(0), next_scales = layout.scales_at(1) - first_scales;
  const size_t offsets_at = LANES * size_of(scheme.scales);
  const char *heads = stretch.at, *codes = nullptr;
  stretch.each([&](int unit, int group, int begin, int last, int chunk, int stop) __attribute__((always_inline)) {
    if (!group && chunk == begin) {
      heads = stretch.at + unit * unit_bytes;
      codes = heads + layout.codes(0, stretch.vec);
      heads += layout.head(0, stretch.vec);
      for (size_t i = 0; i < VECS * layout.head_bytes; i += 64) fetch_codes(heads + i);
      if (scheme.units != RL_NO_NUMBERS) {
        numbers(scheme.units, heads, ones[0], units[0]);
        if (has_offsets) numbers(scheme.units, heads + layout.offset_units_at(), ones[1], units[1]);
      }
    }
    NativeInts found[ROWS][COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; j++) found[i][j] = NativeInts{};
    if (least)
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; j++) found[i][j] = least * tile.sum(i, chunk, stop) - NativeInts{};
    // A single row's odd digits are multiplied without a shift, and the sum is divided by 16. This takes fewer
    // instructions, and makes two chains of sums that do not wait for each other.
    constexpr bool APART = ROWS == 1 && KIND == Shorts::DIGITS;
    NativeInts odd[ROWS][COUNT] = {};
    for (size_t at = 2 * CHUNK * chunk; at < static_cast<size_t>(2 * CHUNK * stop); at += 2 * CHUNK) {
#pragma GCC unroll 8
      for (int word = 0; word < WORDS; word++) {
        NativeInts panel[COUNT];
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; j++) {
          const char* own = codes + j * REGISTER;
          if (word % TOGETHER < ROWS_TOGETHER && j * REGISTER % 64 == 0)
            fetch_codes(own + word % TOGETHER * row_bytes);
          if constexpr (KIND == Shorts::LOOKED_UP)
            panel[j] = Isa::look_up_shorts(table, own, word % TOGETHER);
          else if constexpr (APART)
            panel[j] = load_as<NativeInts>(own) >> (word & 2) * 4 & (word & 1 ? 0x00f000f0 : 0x000f000f);
          else if constexpr (KIND == Shorts::DIGITS)
            panel[j] = Isa::digits(own, word % TOGETHER);
          else if constexpr (KIND == Shorts::SIX_BITS)
            panel[j] = Isa::six_bits(own, row_bytes, word);
          else
            panel[j] = Isa::shorts(own);
        }
        Isa::add_shorts(APART && word % 2 ? odd : found, panel,
                        [&](int i) { return load_as<int32_t>(rows[i] + at + 4 * word); });
        if (word % TOGETHER == TOGETHER - 1) codes += ROWS_TOGETHER * row_bytes;
      }
    }
    if constexpr (APART)
      for (int j = 0; j < COUNT; j++) found[0][j] += odd[0][j] >> 4;
    Native scales[COUNT];
    const char* head = heads + first_scales + group * next_scales;
    numbers(scheme.scales, head, units[0], scales);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; j++)
        all[i][j] = Isa::multiply_add(__builtin_convertvector(found[i][j], Native), scales[j], all[i][j]);
    if (!has_offsets || stop < last) return;
    numbers(scheme.offsets, head + offsets_at, units[1], scales);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Native sum = Isa::splat(static_cast<float>(tile.sum(i, begin, last)));
#pragma GCC unroll 6
      for (int j = 0; j < COUNT; j++) all[i][j] = Isa::multiply_add(sum, scales[j], all[i][j]);
    }
  });
  for (int i = 0; i < ROWS; i++) {
    const float scale = scale_at ? load_as<float>(tile.x + i * tile.stride + scale_at) : 1.0f;
    for (int j = 0; scale_at && j < COUNT; j++) all[i][j] *= scale;
    std::memcpy(sums + i * lds, all[i], sizeof own_sums[i]);
  }
}

using MultiplyStretch = void (*)(const GroupStretch&, const ShortTile&, int, float, int, float*, size_t);

template <Shorts KIND, int VECS, int... ROWS>
MultiplyStretch multiply_stretch_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr MultiplyStretch all[] = {multiply_stretch<KIND, ROWS + 1, VECS>...};
  return all[rows - 1];
}
template <Shorts KIND>
MultiplyStretch multiply_stretch_of(int rows, int vecs) {
  const auto with = [&](auto constant) {
    constexpr int VECS = decltype(constant)::value;
    return multiply_stretch_of<KIND, VECS>(rows, std::make_integer_sequence<int, group_rows(VECS)>());
  };
  return vecs == 3   ? with(std::integral_constant<int, 3>())
         : vecs == 2 ? with(std::integral_constant<int, 2>())
                     : with(std::integral_constant<int, 1>());
}

}  // namespace detail

// Multiplies x[rows, inputs] by the vectors vec : vec + vecs of the panel's part at `panel`, into
// sums[rows, COLUMNS].
template <int COLUMNS>
void multiply_groups(const int16_t* x, size_t stride, int rows, const CodeLayout& layout, int inputs,
                     const char* panel, int vec, int vecs, float* sums) {
  // Most inputs of a stretch, but at least a unit. Later passes find a stretch in the first level of cache with one
  // tile of rows, in the second with several tiles.
  constexpr int STRETCH = 320, LONG_STRETCH = 1600;
  using detail::Shorts;
  const RlScheme& scheme = layout.scheme;
  const float factor = 1.0f / static_cast<float>(layout.whole);
  auto* of_kind = layout.six_bits                ? detail::multiply_stretch_of<Shorts::SIX_BITS>
                  : scheme.codes != RL_FOUR_BITS ? detail::multiply_stretch_of<Shorts::BYTES>
                  : layout.digits                ? detail::multiply_stretch_of<Shorts::DIGITS>
                                                 : detail::multiply_stretch_of<Shorts::LOOKED_UP>;
  const int tiles = ceil_div(rows, Isa::SHORT_ROWS);
  const int tile_vecs = std::min(vecs, Isa::short_vecs(ceil_div(rows, tiles)));
  const int unit = scheme.unit_groups, all = ceil_div(layout.chunks, layout.group_chunks);
  const int units = ceil_div(all, unit);
  const int most_units = tiles == 1 && tile_vecs == vecs
                             ? units
                             : std::max(1, (tiles > 1 ? LONG_STRETCH : STRETCH) / (layout.unit_chunks * CHUNK));
  const int stretch_units = ceil_div(units, ceil_div(units, most_units)), most = stretch_units * unit;
  for (int first = 0; first < all; first += most) {
    const int count = std::min(most, all - first);
    const int scale_at = first + count == all ? ShortRows::scale_at(inputs) : 0;
    for (int j = 0; j < vecs; j += tile_vecs)
      for (int i = 0, row_at = 0; i < tiles; i++) {
        const int own = rows / tiles + (i < rows % tiles);
        const GroupStretch stretch{layout, panel, vec + j, first, count};
        of_kind(own, std::min(tile_vecs, vecs - j))(
            stretch, {x + row_at * stride, stride, ShortRows::sums_at(inputs)}, -layout.shift, factor,
            scale_at, sums + row_at * COLUMNS + j * LANES, COLUMNS);
        row_at += own;
      }
    panel += stretch_units * layout.unit_bytes();
  }
}

}  // namespace rootlace
