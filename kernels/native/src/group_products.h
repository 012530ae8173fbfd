// Products of integers with codes that have scales for groups of inputs: `CodeLayout::grouped`.
//
// A row of x is integers n of 16 bits (short_rows.h). Sums of their products with codes are exact: of a
// group, or of MOST_SUMMED inputs at a time of a longer one. Then, in float32, each step rounded,
//     y += sum * scale, and behind a group's last inputs y += (the sum of its n) * offset,
// group by group, in order. So y, times the row's scale, has the same bits in any company.
#pragma once

#include <algorithm>
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
  int ahead;            // bytes from codes to those that are fetched meanwhile; 0: none
};

namespace detail {

constexpr int GROUP_ROWS = 8, GROUP_VECS = 3;  // of a tile, at most

// sums[ROWS, VECS * 16], rows `lds` apart, of the stretch and of all before it.
template <bool HALVES, bool OFFSETS, int ROWS, int VECS>
void add_groups(const GroupStretch& stretch, const int16_t* x, size_t stride, int sums_at, float* sums,
                size_t lds) {
  // Rows of pairs of inputs, and how many share a register of codes.
  constexpr int PAIRS = CHUNK / 2, TOGETHER = HALVES ? 4 : 1;
  constexpr int REGISTER = HALVES ? 64 : 32;  // bytes
  const CodeLayout& layout = stretch.layout;
  const size_t vec = layout.chunk_bytes, chunk_bytes = layout.vecs * vec;
  const char* codes = stretch.codes;
  const float* scales = stretch.scales;
  typename Isa::ShortTable table;
  if constexpr (HALVES) table = Isa::short_table(layout.scheme.table, integers_of(layout.scheme));
  int left = layout.scheme.unit_groups;
  for (int group = stretch.first; group < stretch.first + stretch.count; group++) {
    const int begin = group * layout.group_chunks;
    const int end = std::min(begin + layout.group_chunks, layout.chunks);
    for (int chunk = begin, stop; chunk < end;) {
      stop = std::min(chunk + MOST_SUMMED / CHUNK, end);
      NativeInts found[ROWS][VECS] = {};
      const int16_t* a = x + chunk * CHUNK;
      for (; chunk < stop; chunk++, a += CHUNK, codes += chunk_bytes) {
        if (stretch.ahead)
          for (size_t i = 0; i < chunk_bytes; i += 64) __builtin_prefetch(codes + stretch.ahead + i, 0, 3);
#pragma GCC unroll 8
        for (int pair = 0; pair < PAIRS; pair++) {
          const char* from = codes + pair / TOGETHER * REGISTER;
          NativeInts panel[VECS];
#pragma GCC unroll 3
          for (int j = 0; j < VECS; j++)
            if constexpr (HALVES)
              panel[j] = Isa::look_up_shorts(table, from + j * vec, pair % TOGETHER);
            else
              panel[j] = Isa::shorts(from + j * vec);
          Isa::add_shorts(found, panel,
                          [&](int i) { return load_as<int32_t>(a + i * stride + 2 * pair); });
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (int j = 0; j < VECS; j++) {
          float* to = sums + i * lds + j * LANES;
          const Native n = __builtin_convertvector(found[i][j], Native);
          const Native part = Isa::rounded(n * load_as<Native>(scales + j * LANES));
          const Native sum = stop > MOST_SUMMED / CHUNK || group ? part + load_as<Native>(to) : part;
          std::memcpy(to, &sum, sizeof sum);
        }
    }
    if (OFFSETS)
      for (int i = 0; i < ROWS; i++) {
        const char* before = reinterpret_cast<const char*>(x + i * stride + sums_at);
        const float all = static_cast<float>(load_as<int32_t>(before + end * 4) -
                                             load_as<int32_t>(before + begin * 4));
#pragma GCC unroll 3
        for (int j = 0; j < VECS; j++) {
          float* to = sums + i * lds + j * LANES;
          const Native offset = load_as<Native>(scales + (GROUP_VECS + j) * LANES);
          const Native sum = load_as<Native>(to) + Isa::rounded(offset * all);
          std::memcpy(to, &sum, sizeof sum);
        }
      }
    scales += (OFFSETS ? 2 : 1) * GROUP_VECS * LANES;
    if (--left == 0) {
      left = layout.scheme.unit_groups;
      const size_t heads = layout.vecs * layout.head_bytes;
      if (stretch.ahead)
        for (size_t i = 0; i < heads; i += 64) __builtin_prefetch(codes + stretch.ahead + i, 0, 3);
      codes += heads;
    }
  }
}

using AddGroups = void (*)(const GroupStretch&, const int16_t*, size_t, int, float*, size_t);

template <bool HALVES, bool OFFSETS, int VECS, int... ROWS>
AddGroups add_groups_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr AddGroups all[] = {add_groups<HALVES, OFFSETS, ROWS + 1, VECS>...};
  return all[rows - 1];
}
template <bool HALVES, bool OFFSETS>
AddGroups add_groups_of(int rows, int vecs) {
  constexpr std::make_integer_sequence<int, GROUP_ROWS> ROWS;
  return vecs == 3   ? add_groups_of<HALVES, OFFSETS, 3>(rows, ROWS)
         : vecs == 2 ? add_groups_of<HALVES, OFFSETS, 2>(rows, ROWS)
                     : add_groups_of<HALVES, OFFSETS, 1>(rows, ROWS);
}

// Scales, or offsets, of so many groups of a vector, times a power of two, `apart` numbers from one to the
// next. `head`: that of the first one's unit, which it begins.
inline void put_scales(const CodeLayout& layout, const char* head, int count, bool offsets,
                       float factor, float* to, size_t apart) {
  const RlScheme& scheme = layout.scheme;
  const bool units = scheme.units != RL_NO_NUMBERS;
  const size_t unit_at = offsets ? layout.offset_units_at() : 0;
  with_numbers(offsets ? scheme.offsets : scheme.scales, [&](auto load) {
    const size_t begin = offsets ? layout.offsets_at(0) : layout.scales_at(0);
    const size_t next = layout.scales_at(1) - layout.scales_at(0);
    for (int unit = 0; count > 0; unit++, count -= scheme.unit_groups) {
      const char* own = head + unit * layout.unit_bytes();
      const Vec each = units ? load_numbers(scheme.units, own + unit_at) * factor : splat(factor);
      own += begin;
      for (int group = 0; group < std::min(count, scheme.unit_groups); group++, own += next) {
        store(to, load(own) * each);
        to += apart;
      }
    }
  });
}

}  // namespace detail

// sums[i] = row i of x[rows, inputs] times the codes of the vectors vec : vec + vecs of the panel's part
// at `panel`; rows of sums have COLUMNS. `scratch` takes the scales of a stretch.
template <int COLUMNS>
void multiply_groups(const int16_t* x, size_t stride, int rows, const CodeLayout& layout, int inputs,
                     const char* panel, int vec, int vecs, float* scratch, float* sums) {
  constexpr int STRETCH = 512;  // inputs, if units are not longer: their codes stay in the first level
  constexpr int AHEAD = 4096;
  const bool offsets = layout.scheme.offsets != RL_NO_NUMBERS;
  const bool halves = layout.scheme.codes == RL_FOUR_BITS;
  const float factor = 1.0f / static_cast<float>(integers_of(layout.scheme));
  const int unit = layout.scheme.unit_groups, all = ceil_div(layout.chunks, layout.group_chunks);
  const int most = std::max(1, STRETCH / (layout.unit_chunks * CHUNK)) * unit;
  const size_t apart = (1 + offsets) * detail::GROUP_VECS * LANES;
  const int tiles = ceil_div(rows, detail::GROUP_ROWS);
  const char* codes = panel + layout.codes(0, vec);
  const char* heads = panel + layout.head(0, vec);
  for (int first = 0; first < all; first += most) {
    GroupStretch stretch{layout, codes, scratch, first, std::min(most, all - first), AHEAD};
    for (int j = 0; j < vecs; j++)
      for (int part = 0; part < 1 + offsets; part++)
        detail::put_scales(layout, heads + j * layout.head_bytes, stretch.count, part,
                           part ? 1.0f : factor, scratch + (part * detail::GROUP_VECS + j) * LANES,
                           apart);
    for (int i = 0, row = 0; i < tiles; i++) {
      const int count = rows / tiles + (i < rows % tiles);
      auto* add = halves ? offsets ? detail::add_groups_of<true, true>(count, vecs)
                                   : detail::add_groups_of<true, false>(count, vecs)
                         : offsets ? detail::add_groups_of<false, true>(count, vecs)
                                   : detail::add_groups_of<false, false>(count, vecs);
      add(stretch, x + row * stride, stride, ShortRows::sums_at(inputs), sums + row * COLUMNS, COLUMNS);
      row += count;
      stretch.ahead = 0;  // the others find what the first one has read
    }
    codes += most / unit * layout.unit_bytes();
    heads += most / unit * layout.unit_bytes();
  }
}

}  // namespace rootlace
