// Products of integers with codes that have scales for groups of inputs: `CodeLayout::grouped`.
//
// A row of x is integers n of 16 bits (short_rows.h). Sums of their products with codes are exact: of a
// group, or of MOST_SUMMED inputs at a time of a longer one. Then, in float32, each rounded once,
//     y += sum * scale, and behind a group's last inputs y += (the sum of its n) * offset,
// group by group, in order. So y, times the row's scale, has the same bits in any company.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "codes.h"
#include "short_rows.h"
#include "vec.h"

namespace rootlace {

// Of so many inputs sums have 32 bits.
constexpr int MOST_SUMMED = 512;

// Groups of a stretch of a panel, whole units of them.
struct GroupStretch {
  const CodeLayout& layout;
  const char* codes;    // of the first vector
  const float* scales;  // of each group [VECS][LANES], and as many offsets if there are any
  int first, count;     // groups
  // What is fetched meanwhile: so many bytes with each chunk, so many with each unit's heads, all `ahead`
  // bytes behind where codes are.
  ptrdiff_t ahead;
  size_t chunk_fetched, heads_fetched;
  int scale_at;  // where a row's scale is, if these are the last groups; else 0
};

namespace detail {

constexpr int GROUP_VECS = 3;  // of a stretch, at most

// How many rows tiles of so many vectors have at most.
constexpr int group_rows(int vecs) {
  int rows = Isa::SHORT_ROWS;
  while (Isa::short_vecs(rows) < vecs) rows--;
  return rows;
}

// What codes become that are multiplied by integers.
enum class Shorts { BYTES, DIGITS, LOOKED_UP };

// sums[ROWS, VECS * 16], rows `lds` apart, of the stretch and of all before it. `least`: what each of the
// integers that codes become is too small by.
template <Shorts KIND, bool OFFSETS, int ROWS, int VECS>
void add_groups(const GroupStretch& stretch, const int16_t* x, size_t stride, int sums_at, int least,
                float* sums, size_t lds) {
  // Rows of pairs of inputs, and how many share a register of codes; registers of a vector, and of all.
  constexpr bool HALVES = KIND != Shorts::BYTES;
  constexpr int PAIRS = CHUNK / 2, TOGETHER = HALVES ? 4 : 1;
  constexpr int PER = LANES / NATIVE, COUNT = VECS * PER;
  constexpr int REGISTER = NATIVE * (HALVES ? 4 : 2);  // bytes
  const CodeLayout& layout = stretch.layout;
  const size_t vec = layout.chunk_bytes, chunk_bytes = layout.vecs * vec;
  const char* codes = stretch.codes;
  const float* scales = stretch.scales;
  const ptrdiff_t ahead = stretch.ahead;
  const size_t chunk_fetched = stretch.chunk_fetched;
  typename Isa::ShortTable table;
  if constexpr (KIND == Shorts::LOOKED_UP)
    table = Isa::short_table(layout.scheme.table, integers_of(layout.scheme));
  // The sum of a row's integers from one chunk to another.
  const auto sum_of = [&](int row, int begin, int end) {
    const char* before = reinterpret_cast<const char*>(x + row * stride + sums_at);
    return load_as<int32_t>(before + end * 4) - load_as<int32_t>(before + begin * 4);
  };
  Native all[ROWS][COUNT] = {};
  if (stretch.first)
    for (int i = 0; i < ROWS; i++) std::memcpy(all[i], sums + i * lds, sizeof all[i]);
  int left = layout.scheme.unit_groups;
  for (int group = stretch.first; group < stretch.first + stretch.count; group++) {
    const int begin = group * layout.group_chunks;
    const int end = std::min(begin + layout.group_chunks, layout.chunks);
    for (int chunk = begin, stop; chunk < end;) {
      stop = std::min(chunk + MOST_SUMMED / CHUNK, end);
      NativeInts found[ROWS][COUNT];
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; j++)
          found[i][j] = HALVES ? least * sum_of(i, chunk, stop) - NativeInts{} : NativeInts{};
      const int16_t* a = x + chunk * CHUNK;
      for (; chunk < stop; chunk++, a += CHUNK, codes += chunk_bytes) {
        for (size_t i = 0; i < chunk_fetched; i += 64) __builtin_prefetch(codes + ahead + i, 0, 3);
#pragma GCC unroll 8
        for (int pair = 0; pair < PAIRS; pair++) {
          const char* from = codes + pair / TOGETHER * PER * REGISTER;
          NativeInts panel[COUNT];
#pragma GCC unroll 6
          for (int j = 0; j < COUNT; j++) {
            const char* own = from + j / PER * vec + j % PER * REGISTER;
            if constexpr (KIND == Shorts::LOOKED_UP)
              panel[j] = Isa::look_up_shorts(table, own, pair % TOGETHER);
            else if constexpr (HALVES)
              panel[j] = Isa::digits(own, pair % TOGETHER);
            else
              panel[j] = Isa::shorts(own);
          }
          Isa::add_shorts(found, panel,
                          [&](int i) { return load_as<int32_t>(a + i * stride + 2 * pair); });
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; j++)
          all[i][j] = Isa::multiply_add(__builtin_convertvector(found[i][j], Native),
                                        load_as<Native>(scales + j * NATIVE), all[i][j]);
    }
    if (OFFSETS)
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        const Native sum = Isa::splat(static_cast<float>(sum_of(i, begin, end)));
#pragma GCC unroll 6
        for (int j = 0; j < COUNT; j++)
          all[i][j] = Isa::multiply_add(
              sum, load_as<Native>(scales + GROUP_VECS * LANES + j * NATIVE), all[i][j]);
      }
    scales += (OFFSETS ? 2 : 1) * GROUP_VECS * LANES;
    if (--left == 0) {
      left = layout.scheme.unit_groups;
      for (size_t i = 0; i < stretch.heads_fetched; i += 64)
        __builtin_prefetch(codes + ahead + i, 0, 3);
      codes += layout.vecs * layout.head_bytes;
    }
  }
  for (int i = 0; i < ROWS; i++) {
    const float scale = stretch.scale_at ? load_as<float>(x + i * stride + stretch.scale_at) : 1.0f;
    for (int j = 0; stretch.scale_at && j < COUNT; j++) all[i][j] *= scale;
    std::memcpy(sums + i * lds, all[i], sizeof all[i]);
  }
}

using AddGroups = void (*)(const GroupStretch&, const int16_t*, size_t, int, int, float*, size_t);

template <Shorts KIND, bool OFFSETS, int VECS, int... ROWS>
AddGroups add_groups_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr AddGroups all[] = {add_groups<KIND, OFFSETS, ROWS + 1, VECS>...};
  return all[rows - 1];
}
template <Shorts KIND, bool OFFSETS>
AddGroups add_groups_of(int rows, int vecs) {
  const auto with = [&](auto constant) {
    constexpr int VECS = decltype(constant)::value;
    return add_groups_of<KIND, OFFSETS, VECS>(rows, std::make_integer_sequence<int, group_rows(VECS)>());
  };
  return vecs == 3   ? with(std::integral_constant<int, 3>())
         : vecs == 2 ? with(std::integral_constant<int, 2>())
                     : with(std::integral_constant<int, 1>());
}
template <Shorts KIND>
AddGroups add_groups_of(bool offsets, int rows, int vecs) {
  return offsets ? add_groups_of<KIND, true>(rows, vecs) : add_groups_of<KIND, false>(rows, vecs);
}

// Scales, or offsets, of so many groups of `vecs` vectors, times a power of two, `apart` numbers from one
// group's to the next. `heads`: those of the first one's unit, which it begins.
inline void put_scales(const CodeLayout& layout, const char* heads, int vecs, int count, bool offsets,
                       float factor, float* to, size_t apart) {
  constexpr int PER = LANES / NATIVE;
  const RlScheme& scheme = layout.scheme;
  const bool units = scheme.units != RL_NO_NUMBERS;
  const int32_t kind = offsets ? scheme.offsets : scheme.scales;
  const size_t first = offsets ? layout.offsets_at(0) : layout.scales_at(0);
  const size_t next = layout.scales_at(1) - layout.scales_at(0), head_bytes = layout.head_bytes;
  const size_t unit_bytes = layout.unit_bytes();
  const int unit_groups = scheme.unit_groups, bytes = NATIVE * size_of(kind);
  with_numbers(kind, [&](auto load) {
    Native each[GROUP_VECS * PER];
    for (Native& one : each) one = Isa::splat(factor);
    for (; count > 0; count -= unit_groups, heads += unit_bytes) {
      for (int j = 0; units && j < vecs; j++) {
        const char* own = heads + j * head_bytes + (offsets ? layout.offset_units_at() : 0);
        const Vec unit = load_numbers(scheme.units, own) * factor;
        std::memcpy(each + j * PER, &unit, sizeof unit);
      }
      const char* at = heads + first;
      for (int group = 0; group < std::min(count, unit_groups); group++, at += next, to += apart)
        for (int j = 0; j < vecs; j++)
#pragma GCC unroll 4
          for (int i = 0; i < PER; i++) {
            const Native some = load(at + j * head_bytes + i * bytes) * each[j * PER + i];
            std::memcpy(to + j * LANES + i * NATIVE, &some, sizeof some);
          }
    }
  });
}

}  // namespace detail

// sums[i] = what row i of x[rows, inputs] stands for times the codes of the vectors vec : vec + vecs of the panel's part
// at `panel`; rows of sums have COLUMNS. `scratch` takes the scales of a stretch.
template <int COLUMNS>
void multiply_groups(const int16_t* x, size_t stride, int rows, const CodeLayout& layout, int inputs,
                     const char* panel, int vec, int vecs, float* scratch, float* sums) {
  // Inputs of a stretch at most, if units are not longer. The codes of one and of the next, which is
  // fetched meanwhile, stay in the first level.
  constexpr int STRETCH = 320;
  using detail::Shorts;
  const RlScheme& scheme = layout.scheme;
  const bool offsets = scheme.offsets != RL_NO_NUMBERS;
  const int whole = integers_of(scheme);
  const float factor = 1.0f / static_cast<float>(whole);
  const auto* numbers = scheme.table;
  const bool digits = Isa::DIGITS && scheme.codes == RL_FOUR_BITS && [&] {
    for (int i = 1; i < 16; i++)
      if ((numbers[i] - numbers[0]) * whole != i) return false;
    return true;
  }();
  const int least = digits ? static_cast<int>(numbers[0] * whole) : -Isa::SHORT_SHIFT;
  auto* of_kind = scheme.codes != RL_FOUR_BITS ? detail::add_groups_of<Shorts::BYTES>
                  : digits                     ? detail::add_groups_of<Shorts::DIGITS>
                                               : detail::add_groups_of<Shorts::LOOKED_UP>;
  const int unit = scheme.unit_groups, all = ceil_div(layout.chunks, layout.group_chunks);
  const int units = ceil_div(all, unit), most_units = std::max(1, STRETCH / (layout.unit_chunks * CHUNK));
  const int stretch_units = ceil_div(units, ceil_div(units, most_units)), most = stretch_units * unit;
  const size_t apart = (1 + offsets) * detail::GROUP_VECS * LANES;
  const int tiles = ceil_div(rows, Isa::SHORT_ROWS);
  const int tile_vecs = std::min(vecs, Isa::short_vecs(ceil_div(rows, tiles)));
  // Each pass through a stretch fetches as much of the next one: all at once would wait for one another.
  const size_t step = stretch_units * layout.unit_bytes(), ahead = std::min<size_t>(step, 16384);
  const size_t row = vecs * layout.chunk_bytes;
  const size_t share = ceil_div(ceil_div(row, 64), tiles * ceil_div(vecs, tile_vecs)) * 64;
  const char* codes = panel + layout.codes(0, vec);
  const char* heads = panel + layout.head(0, vec);
  for (int first = 0; first < all; first += most) {
    const int count = std::min(most, all - first);
    for (int part = 0; part < 1 + offsets; part++)
      detail::put_scales(layout, heads, vecs, count, part, part ? 1.0f : factor,
                         scratch + part * detail::GROUP_VECS * LANES, apart);
    size_t fetched = 0;
    for (int j = 0; j < vecs; j += tile_vecs)
      for (int i = 0, first_row = 0; i < tiles; i++) {
        const int own = rows / tiles + (i < rows % tiles);
        const GroupStretch stretch{layout,
                                   codes + j * layout.chunk_bytes,
                                   scratch + j * LANES,
                                   first,
                                   count,
                                   static_cast<ptrdiff_t>(ahead + fetched) -
                                       static_cast<ptrdiff_t>(j * layout.chunk_bytes),
                                   std::min(share, row - fetched),
                                   fetched ? 0 : layout.vecs * layout.head_bytes,
                                   first + count == all ? ShortRows::scale_at(inputs) : 0};
        of_kind(offsets, own, std::min(tile_vecs, vecs - j))(
            stretch, x + first_row * stride, stride, ShortRows::sums_at(inputs), least,
            sums + first_row * COLUMNS + j * LANES, COLUMNS);
        first_row += own;
        fetched += stretch.chunk_fetched;
      }
    codes += step;
    heads += step;
  }
}

}  // namespace rootlace
