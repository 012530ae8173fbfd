// Weights kept as codes (`RlScheme`): layout in memory, and unpacking.
//
//     panel: units, one behind the other
//     unit:  [VECS] heads, then [chunks][VECS] chunks
//     head:  units and offset units, then scales and offsets of each group; 16 numbers of each, one per column
//     chunk: codes of CHUNK inputs x 16 columns
//
// Codes are multiplied in one of three ways:
// - Unpacked to numbers, a stretch at a time, just before the product. So the bits are those of a product with the
//   numbers. Codes of 8 bits lie as the panel's numbers do. Codes of 4 bits are 32-bit words, one for each place in a
//   row of numbers; digit n (from the lowest) of a word belongs to the n-th of 8 rows. For a tile unit the two chunks
//   of a tile lie side by side, and codes of 4 bits lie as in tile_codes.h (`by_column`).
// - `as_bytes`: int8 with one scale per output, by int8 (byte_rows.h). A 32-bit word has four inputs of a column.
//   Words lie as words of numbers do.
// - `grouped`: other codes that stand for integers, by 16-bit integers, group by group (group_products.h), where the
//   instruction set is fast at that. A word has 16 bits for each of two inputs, or with codes of 8 bits a byte. Words
//   of all vectors lie side by side, row by row, as one stream. Pair p of inputs has digit p % 4 of row p / 4 with
//   codes of 4 bits. With codes of 6 bits, less `least`, a chunk has three rows (elsewhere these codes lie as int8):
//       bits:   0-5      6-11     12-15
//       row 0:  pair 0   pair 1   low 4 bits of pair 6
//       row 1:  pair 2   pair 3   low 4 bits of pair 7
//       row 2:  pair 4   pair 5   high 2 bits of pair 6, then of pair 7
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "api.h"
#include "division.h"
#include "tile.h"
#include "vec.h"

namespace rootlace {

constexpr int CHUNK = 16;
constexpr int BYTE_DEPTH = 64;  // inputs of a tile of int8; rows are padded to whole tiles
constexpr int MOST_BYTE_INPUTS = 32768;
constexpr bool CODE_GROUPS = Isa::GROUPS && !HAS_TILES;  // whether codes may be `grouped`
constexpr int SHORT_WORD = 2;  // inputs in a word of `grouped` codes

inline int size_of(int32_t numbers) {
  switch (numbers) {
    case RL_NUMBERS_FLOAT32: return 4;
    case RL_NUMBERS_BFLOAT16:
    case RL_NUMBERS_FLOAT16: return 2;
    case RL_NUMBERS_INT8:
    case RL_NUMBERS_UINT8: return 1;
    default: return 0;
  }
}

// Returns the factor that turns the codes' values into 8-bit integers; 0 if there is none.
inline int integers_of(const RlScheme& scheme) {
  if (scheme.codes == RL_INT8 || scheme.codes == RL_SIX_BITS) return 1;
  if (scheme.codes != RL_FOUR_BITS) return 0;
  const auto whole = [&](float factor) {
    return std::all_of(scheme.table, scheme.table + 16, [&](float x) {
      return x * factor >= -128 && x * factor <= 127 && x * factor == std::floor(x * factor);
    });
  };
  return whole(1) ? 1 : whole(2) ? 2 : 0;
}

// Layout of a panel's codes, with `vecs` vectors of columns and `chunks` chunks of inputs.
struct CodeLayout {
  RlScheme scheme;
  int vecs, chunks, group_chunks, unit_chunks;
  int together;    // chunks of a vector that lie side by side: those of a tile
  bool by_column;  // codes of 4 bits for a tile unit (tile_codes.h)
  bool as_bytes, grouped;
  int rows;  // `as_bytes`: rows of words of a vector that lie one behind the other
  size_t chunk_bytes, head_bytes;
  // `grouped`: factor from values to integers (`integers_of`); excess of unpacked integers over these; whether
  // unpacked integers are the codes of 4 bits themselves; whether codes have 6 bits.
  int whole = 1, shift = 0;
  bool digits = false, six_bits = false;

  CodeLayout() = default;
  CodeLayout(const RlScheme& given, int vecs, int chunks, bool tiles, bool as_bytes, bool grouped)
      : scheme(given), vecs(vecs), chunks(chunks), as_bytes(as_bytes), grouped(grouped) {
    together = tiles ? 2 : 1;
    by_column = tiles && scheme.codes == RL_FOUR_BITS;
    rows = tiles ? BYTE_DEPTH / 4 : 1;
    six_bits = grouped && scheme.codes == RL_SIX_BITS;
    if (scheme.codes == RL_SIX_BITS && !six_bits) scheme.codes = RL_INT8;
    group_chunks = scheme.group ? scheme.group / CHUNK : chunks;
    // Let no tile cross a border of units. (With `units` none does.)
    if (group_chunks * scheme.unit_groups % together) scheme.unit_groups *= 2;
    // Let no register of codes cross a border of cache lines.
    const bool several = scheme.units == RL_NO_NUMBERS && chunks > group_chunks;
    if (grouped && several && vecs * scales_at(1) % 64) scheme.unit_groups *= 2;
    unit_chunks = group_chunks * scheme.unit_groups;
    chunk_bytes = CHUNK * LANES * (six_bits ? 6 : scheme.codes == RL_FOUR_BITS ? 4 : 8) / 8;
    head_bytes = scales_at(scheme.unit_groups);
    if (!grouped) return;
    whole = integers_of(scheme);
    const bool four_bits = scheme.codes == RL_FOUR_BITS;
    const float* numbers = scheme.table;
    digits = Isa::DIGITS && four_bits;
    for (int i = 1; i < 16; i++) digits = digits && (numbers[i] - numbers[0]) * whole == i;
    if (digits)
      shift = -static_cast<int>(numbers[0] * whole);
    else if (four_bits)
      shift = Isa::SHORT_SHIFT;
    else if (six_bits)
      shift = -scheme.least;
  }

  size_t bytes() const { return ceil_div(chunks, unit_chunks) * unit_bytes(); }

  // Byte offsets in a panel's part: of a vector's head, and of its codes for a chunk.
  size_t head(int chunk, int vec) const {
    return chunk / unit_chunks * unit_bytes() + vec * head_bytes;
  }
  size_t codes(int chunk, int vec) const {
    const int before = chunk % unit_chunks / together * together;
    if (grouped) return head(chunk, vecs) + before * vecs * chunk_bytes + vec * word_bytes();
    const size_t place = before * vecs + vec * together + chunk % together;
    return head(chunk, vecs) + place * chunk_bytes;
  }

  // `grouped`: bytes of a vector in a row of words.
  size_t word_bytes() const {
    return LANES * (six_bits || scheme.codes == RL_FOUR_BITS ? 4 : SHORT_WORD);
  }

  // `as_bytes`: byte offset of the code of an input and of column `lane` of a vector.
  size_t byte(int input, int vec, int lane) const {
    const int row = input / 4;
    const size_t words = (row / rows * vecs + vec) * static_cast<size_t>(rows) + row % rows;
    return head(0, vecs) + (words * LANES + lane) * 4 + input % 4;
  }

  // Byte offsets in a head.
  size_t offset_units_at() const { return LANES * size_of(scheme.units); }
  size_t scales_at(int group) const {
    const bool both = scheme.offsets != RL_NO_NUMBERS;
    const size_t units = offset_units_at() * (both ? 2 : 1);
    return units + group * LANES * (size_of(scheme.scales) + size_of(scheme.offsets));
  }
  size_t offsets_at(int group) const { return scales_at(group) + LANES * size_of(scheme.scales); }

  size_t unit_bytes() const { return vecs * (head_bytes + unit_chunks * chunk_bytes); }
};

// Layouts of a panel's parts, in their order in memory. `count` 0: weights are numbers, not codes.
struct Codes {
  CodeLayout parts[2];
  int count = 0;

  template <class Panels>
  Codes(const Panels& panels, const RlScheme* schemes) {
    if (!schemes) return;
    const RlScheme* end = schemes + panels.parts;
    const bool few = panels.inputs <= MOST_BYTE_INPUTS;
    const bool bytes = Panels::BYTES && few && std::all_of(schemes, end, is_bytes);
    const bool grouped = Panels::GROUPS && few && !bytes &&
                         std::all_of(schemes, end, [](auto& one) { return integers_of(one) > 0; });
    const int whole = ceil_div(panels.inputs, BYTE_DEPTH) * (BYTE_DEPTH / CHUNK);
    const int chunks = bytes ? whole : panels.chunks();
    for (; count < panels.parts; count++)
      parts[count] =
          CodeLayout(schemes[count], Panels::VECS, chunks, Panels::TILES, bytes, grouped);
  }

  explicit operator bool() const { return count > 0; }
  bool as_bytes() const { return count && parts[0].as_bytes; }
  bool grouped() const { return count && parts[0].grouped; }

  // Bytes of a panel; byte offset of a part in the panel.
  size_t bytes() const { return part_at(count); }
  size_t part_at(int part) const {
    size_t at = 0;
    for (int i = 0; i < part; i++) at += parts[i].bytes();
    return at;
  }

 private:
  static bool is_bytes(const RlScheme& one) {
    return one.codes == RL_INT8 && !one.group && one.offsets == RL_NO_NUMBERS;
  }
};

namespace detail {

// Calls use(load), where load(p) reads a register of `numbers` (RlNumbers) as float32.
template <class Use>
[[gnu::always_inline]] inline auto with_numbers(int32_t numbers, Use&& use) {
  switch (numbers) {
    case RL_NUMBERS_FLOAT32:
      return use([](const char* p) { return load_as<Native>(p); });
    case RL_NUMBERS_BFLOAT16:
      return use([](const char* p) { return (Native)(Isa::from_uint16(p) << 16); });
    case RL_NUMBERS_FLOAT16:
      return use([](const char* p) { return Isa::from_half(p); });
    case RL_NUMBERS_INT8:
      return use([](const char* p) { return Isa::from_int8(p); });
    default:
      return use([](const char* p) { return __builtin_convertvector(Isa::from_uint8(p), Native); });
  }
}

inline Vec load_numbers(int32_t numbers, const char* p) {
  return with_numbers(numbers, [&](auto load) {
    Native all[LANES / NATIVE];
    for (int i = 0; i < LANES / NATIVE; i++) all[i] = load(p + i * NATIVE * size_of(numbers));
    return load_as<Vec>(all);
  });
}

}  // namespace detail

// Cursor over a vector's codes and scales, group by group from the first input on.
class Groups {
 public:
  Groups() = default;
  Groups(const CodeLayout& layout, const char* panel, int vec)
      : layout_(&layout),
        head_(panel + layout.head(0, vec)),
        codes_(panel + layout.codes(0, vec)),
        left_(layout.group_chunks) {}

  const CodeLayout& layout() const { return *layout_; }
  Vec scales() const { return numbers(layout_->scheme.scales, layout_->scales_at(group_), 0); }
  Vec offsets() const {
    const size_t units = layout_->offset_units_at();
    return numbers(layout_->scheme.offsets, layout_->offsets_at(group_), units);
  }

  // Chunks left in the group; address of their codes, if the next chunk is a tile's first.
  int left() const { return left_; }
  const char* codes() const { return codes_; }
  bool begins() const { return left_ == layout_->group_chunks; }

  // At the beginning of a unit, fetches the head `ahead` bytes behind the unit's own.
  void fetch_scales(int ahead) const {
    if (group_) return;
    for (size_t i = 0; i < layout_->head_bytes; i += 64) __builtin_prefetch(head_ + ahead + i, 0, 3);
  }

  // Skips `chunks` chunks, at most those left in the group.
  void skip(int chunks) {
    codes_ += chunks * layout_->vecs * layout_->chunk_bytes;
    left_ -= chunks;
    if (left_ > 0) return;
    left_ = layout_->group_chunks;
    if (++group_ < layout_->scheme.unit_groups) return;
    group_ = 0;
    head_ += layout_->unit_bytes();
    codes_ += layout_->vecs * layout_->head_bytes;
  }

 private:
  Vec numbers(int32_t kind, size_t at, size_t units) const {
    const Vec scales = detail::load_numbers(kind, head_ + at);
    if (layout_->scheme.units == RL_NO_NUMBERS) return scales;
    return scales * detail::load_numbers(layout_->scheme.units, head_ + units);
  }

  const CodeLayout* layout_ = nullptr;
  const char *head_ = nullptr, *codes_ = nullptr;
  int group_ = 0, left_ = 0;
};

// Packed weights, with the layouts of their codes if they are codes.
struct PackedWeights {
  const void* packed;
  const Codes& codes;

  // Returns the address of a panel's part.
  const char* part(int panel, int part) const {
    return static_cast<const char*>(packed) + panel * codes.bytes() + codes.part_at(part);
  }

  // Places `groups` at the beginning of the vectors vec : vec + vecs of a panel's part.
  void vectors_of(int panel, int part, int vec, int vecs, Groups* groups) const {
    const char* at = this->part(panel, part);
    for (int i = 0; i < vecs; i++) groups[i] = Groups(codes.parts[part], at, vec + i);
  }
};

// Fetches later codes in two steps: few lines at a time can be on their way to the first level of cache, too few to
// hide the latency of memory.
[[gnu::always_inline]] inline void fetch_codes(const char* line, int far = 8192, int near = 2048) {
  __builtin_prefetch(line + far, 0, 2);
  __builtin_prefetch(line + near, 0, 3);
}

namespace detail {

inline void put_row(float* to, const Native (&x)[LANES / NATIVE]) {
  std::memcpy(static_cast<void*>(to), x, sizeof x);
}
inline void put_row(bf16* to, const Native (&x)[2 * LANES / NATIVE]) { Isa::narrow_row(to, x); }

// Unpacks a vector's codes to rows of T: 16 columns, a 32-bit word each.
template <class T, int CODES, bool OFFSETS>
class Unpacker {
 public:
  static constexpr int NUMBERS = LANES * STEP<T>;  // of a row
  static constexpr int ROWS = CHUNK / STEP<T>;     // of a chunk

  Unpacker(const CodeLayout& layout) : layout_(layout) {
    if (CODES == RL_FOUR_BITS) table_ = Isa::table(layout.scheme.table);
  }

  // Unpacks the next `chunks` chunks to place(0), place(1), ...
  template <class Place>
  void run(Groups& groups, int chunks, Place&& place) {
    for (int chunk = 0; chunk < chunks;) {
      begin(groups);
      const int count = std::min(groups.left(), chunks - chunk);
      const size_t stride = layout_.vecs * layout_.chunk_bytes;
      const char* codes = groups.codes();
      groups.skip(count);
      for (const int stop = chunk + count; chunk < stop; chunk++, codes += stride) {
        for (size_t i = 0; i < layout_.chunk_bytes; i += 64) fetch_codes(codes + i);
        this->chunk(codes, place(chunk), place.row);
      }
    }
  }

  // Takes the scales of a group.
  void begin(const Groups& groups) {
    spread(groups.scales(), scales_);
    if (OFFSETS) spread(groups.offsets(), offsets_);
  }

  // Unpacks a chunk to rows of numbers, `row` apart.
  [[gnu::always_inline]] void chunk(const char* codes, T* to, size_t row) const {
    // Copies in registers: for all that compilers know, stores to `to` change the members.
    Native scales[COUNT], offsets[COUNT];
    const typename Isa::Table table = table_;
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) {
      scales[j] = scales_[j];
      if (OFFSETS) offsets[j] = offsets_[j];
    }
    const auto scaled = [&](Native x, int column) {
      x *= scales[column];
      return OFFSETS ? Isa::rounded(x) + offsets[column] : x;
    };
    if constexpr (CODES == RL_FOUR_BITS) {
      // A word has a digit for each of 8 rows. A row of float has one vector of words, of bf16 two.
      for (int vector = 0; vector < 2; vector += STEP<T>) {
        typename Isa::NativeWords digits[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; j++)
          digits[j] = load_as<typename Isa::NativeWords>(codes + vector * 64 + j * NATIVE * 4);
#pragma GCC unroll 8
        for (int digit = 0; digit < 8; digit++, to += row) {
          Native x[COUNT];
#pragma GCC unroll 8
          for (int j = 0; j < COUNT; j++)
            x[j] = scaled(Isa::look_up(table, digits[j] >> 4 * digit), j);
          put_row(to, x);
        }
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++, codes += NUMBERS, to += row) {
        Native x[COUNT];
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; j++) {
          const char* from = codes + j * NATIVE;
          x[j] = scaled(CODES == RL_INT8 ? Isa::from_int8(from) : Isa::from_e4m3(from), j);
        }
        put_row(to, x);
      }
    }
  }

 private:
  static constexpr int COUNT = NUMBERS / NATIVE;  // registers of a row

  // Repeats each column's scale for each of the column's numbers in a row.
  static void spread(Vec scales, Native (&to)[COUNT]) {
    alignas(64) float all[NUMBERS];
    if constexpr (STEP<T> == 1)
      store(all, scales);
    else
      Isa::twice(scales, all);
    std::memcpy(static_cast<void*>(to), all, sizeof all);
  }

  const CodeLayout& layout_;
  typename Isa::Table table_;
  Native scales_[COUNT], offsets_[COUNT];
};

}  // namespace detail

// Unpacks the next `chunks` chunks of each vector: a chunk to rows of numbers, `place.row` apart, from
// place(chunk, vector) on. Both are counted from 0.
template <class T, int CODES, class Place>
void unpack_codes(Groups* groups, int vecs, int chunks, const Place& place) {
  struct Column {
    const Place& place;
    const int vec;
    const size_t row;
    T* operator()(int chunk) const { return place(chunk, vec); }
  };
  const CodeLayout& layout = groups->layout();
  const auto all = [&](auto unpacker) {
    for (int i = 0; i < vecs; i++) unpacker.run(groups[i], chunks, Column{place, i, place.row});
  };
  if (layout.scheme.offsets != RL_NO_NUMBERS)
    all(detail::Unpacker<T, CODES, true>(layout));
  else
    all(detail::Unpacker<T, CODES, false>(layout));
}

// The same for codes of eight bits.
template <class T, class Place>
void unpack_bytes(Groups* groups, int vecs, int chunks, const Place& place) {
  const bool integers = groups->layout().scheme.codes == RL_INT8;
  auto* one = integers ? unpack_codes<T, RL_INT8, Place> : unpack_codes<T, RL_E4M3, Place>;
  one(groups, vecs, chunks, place);
}

}  // namespace rootlace
