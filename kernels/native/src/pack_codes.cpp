// Packing of codes into panels, and reading them back: see codes.h.
#include <cstring>
#include <stdexcept>

#include "codes.h"
#include "guard.h"
#include "linear.h"
#include "panels.h"
#include "tile_codes.h"

namespace rootlace {
namespace {

// Place of a code in its chunk's codes. Of six bits the low `bits` are there, in a 16-bit word; others, if any, are
// at `high_byte` and `high_bit`.
struct Digit {
  size_t byte;
  int bit, bits = 0;
  size_t high_byte = 0;
  int high_bit = 0;
};

// Returns the inputs of a chunk, or of two chunks that lie side by side.
int depth_of(const CodeLayout& layout) { return layout.by_column ? 2 * CHUNK : CHUNK; }

// Returns the place of the code of input i, below `depth_of`, and of column `lane` of a vector.
template <class T>
Digit digit_of(const CodeLayout& layout, int lane, int i) {
  const size_t grouped_row = layout.vecs * layout.word_bytes();
  if (layout.six_bits) {
    const int row = i / SHORT_WORD;
    const size_t half = lane * 4 + i % SHORT_WORD * 2;
    if (row < 6) return {row / 2 * grouped_row + half, row % 2 * 6, 6};
    return {(row - 6) * grouped_row + half, 12, 4, 2 * grouped_row + half, 2 * row};
  }
  if (layout.scheme.codes != RL_FOUR_BITS) {
    const int word = layout.grouped ? SHORT_WORD : STEP<T>;
    const size_t row = layout.grouped ? grouped_row : LANES * word;
    return {i / word * row + lane * word + i % word, 0};
  }
  size_t word = 0;  // its byte offset
  int digit = 0;
  if (layout.by_column) {
    word = (lane / 4 * TileCodes::DEPTH + i) * 2, digit = lane % 4;
  } else if (layout.grouped) {
    // Each of a word's SHORT_WORD inputs has an equal part of the 32 bits; higher digits belong to the inputs of
    // later pairs.
    constexpr int DIGITS = 8 / SHORT_WORD;
    const int row = i / SHORT_WORD;
    word = row / DIGITS * grouped_row + lane * 4, digit = i % SHORT_WORD * DIGITS + row % DIGITS;
  } else {
    const int row = i / STEP<T>;
    word = (row / 8 * LANES + lane * STEP<T> + i % STEP<T>) * 4, digit = row % 8;
  }
  return {word + digit / 2, digit % 2 * 4};
}

// Places of the codes of a column's inputs.
template <class T>
struct Digits {
  Digit of[2 * CHUNK];

  Digits(const CodeLayout& layout, int lane) {
    for (int i = 0; i < depth_of(layout); i++) of[i] = digit_of<T>(layout, lane, i);
  }
};

// Packs the codes of one part of a matrix. Rows of the source are its outputs.
template <class T>
class Packer {
 public:
  using Packing = Panels<T>;

  Packer(const Packing& panels, const RlScheme* schemes, int part, const RlSource& source)
      : panels_(panels), codes_(panels, schemes), part_(part), source_(source) {
    group_ = layout().scheme.group ? layout().scheme.group : panels.inputs;
    groups_ = panels.inputs / group_;
  }

  // Packs a panel; behind the last columns and inputs, codes and scales are zero.
  void pack(int index, char* packed) const {
    char* panel = packed + index * codes_.bytes() + codes_.part_at(part_);
    std::memset(panel, 0, layout().bytes());
    const int first = index * Packing::COLUMNS;
    const int count = std::min(Packing::COLUMNS, panels_.columns - first);
    for (int column = 0; column < count; column++) {
      for (int group = 0; group < groups_; group++) put_scales(panel, first + column, column, group);
      if (layout().as_bytes) {
        put_bytes(panel, first + column, column);
        continue;
      }
      const Digits<T> digits(layout(), column % LANES);
      const int depth = depth_of(layout());
      for (int input = 0; input < panels_.inputs; input += depth)
        put_codes(panel + layout().codes(input / CHUNK, column / LANES), first + column, digits.of,
                  input);
    }
  }

 private:
  const CodeLayout& layout() const { return codes_.parts[part_]; }

  void put_scales(char* panel, size_t output, int column, int group) const {
    const RlScheme& scheme = layout().scheme;
    const int lane = column % LANES, in_unit = group % scheme.unit_groups;
    char* head = panel + layout().head(group * layout().group_chunks, column / LANES);
    const auto put = [&](size_t at, const void* from, int32_t numbers, size_t index) {
      const size_t size = size_of(numbers);
      std::memcpy(head + at + lane * size, static_cast<const char*>(from) + index * size, size);
    };
    const size_t at = output * groups_ + group;
    const size_t unit = output * (groups_ / scheme.unit_groups) + group / scheme.unit_groups;
    put(layout().scales_at(in_unit), source_.scales, scheme.scales, at);
    if (source_.units) put(0, source_.units, scheme.units, unit);
    if (!source_.offsets) return;
    put(layout().offsets_at(in_unit), source_.offsets, scheme.offsets, at);
    if (source_.units) put(layout().offset_units_at(), source_.offset_units, scheme.units, unit);
  }

  void put_bytes(char* panel, size_t output, int column) const {
    const char* from = static_cast<const char*>(source_.values) + output * panels_.inputs;
    for (int i = 0; i < panels_.inputs; i++)
      panel[layout().byte(i, column / LANES, column % LANES)] = from[i];
  }

  // Packs the codes of a column's inputs from `input` on, at most `depth_of`.
  void put_codes(char* to, size_t output, const Digit* digits, int input) const {
    const int depth = std::min(depth_of(layout()), panels_.inputs - input);
    const bool four_bits = layout().scheme.codes == RL_FOUR_BITS;
    const auto* from = static_cast<const uint8_t*>(source_.values) +
                       (output * panels_.inputs + input) / (four_bits ? 2 : 1);
    const auto add = [to](size_t at, auto bits) {
      bits |= load_as<decltype(bits)>(to + at);
      std::memcpy(to + at, &bits, sizeof bits);
    };
    for (int i = 0; i < depth; i++) {
      const Digit& digit = digits[i];
      if (four_bits) {
        add(digit.byte, static_cast<uint8_t>((from[i / 2] >> 4 * (i % 2) & 15) << digit.bit));
      } else if (layout().six_bits) {
        const int code = static_cast<int8_t>(from[i]) - layout().scheme.least;
        add(digit.byte, static_cast<uint16_t>((code & (1 << digit.bits) - 1) << digit.bit));
        add(digit.high_byte, static_cast<uint16_t>(code >> digit.bits << digit.high_bit));
      } else {
        to[digit.byte] = static_cast<char>(from[i]);
      }
    }
  }

  const Packing& panels_;
  const Codes codes_;
  const int part_;
  const RlSource& source_;
  int group_, groups_;
};

// Reads the numbers of packed codes, output by output: the inverse of `Packer`.
template <class T>
class RowReader {
 public:
  using Packing = Panels<T>;

  RowReader(const Packing& panels, const RlLinear& weights)
      : codes_(panels, weights.schemes),
        packed_(static_cast<const char*>(weights.packed)),
        inputs_(panels.inputs) {
    if (layout().scheme.codes == RL_E4M3) throw std::invalid_argument("rows of E4M3 are not read");
  }

  // Reads an output's row: codes times scales, rounded, plus offsets.
  void read(int output, float* to) const {
    const int column = output % Packing::COLUMNS, lane = column % LANES;
    const char* panel = packed_ + output / Packing::COLUMNS * codes_.bytes();
    const int group = layout().scheme.group ? layout().scheme.group : inputs_;
    const Digits<T> digits(layout(), lane);
    Groups groups(layout(), panel, column / LANES);
    for (int begin = 0; begin < inputs_; begin += group, groups.skip(groups.left())) {
      const bool both = layout().scheme.offsets != RL_NO_NUMBERS;
      const float scale = groups.scales()[lane], offset = both ? groups.offsets()[lane] : 0;
      const int end = begin + group;
      for (int i = begin; i < end; i += NATIVE) {
        float numbers[NATIVE] = {};
        const int count = std::min(NATIVE, end - i);
        for (int k = 0; k < count; k++)
          numbers[k] = number(panel, i + k, column / LANES, lane, digits.of);
        Native x = load_as<Native>(reinterpret_cast<const char*>(numbers)) * scale;
        if (both) x = Isa::rounded(x) + offset;
        std::memcpy(to + i, &x, count * sizeof *to);
      }
    }
  }

 private:
  const CodeLayout& layout() const { return codes_.parts[0]; }

  float number(const char* panel, int input, int vec, int lane, const Digit* digits) const {
    if (layout().as_bytes) return static_cast<int8_t>(panel[layout().byte(input, vec, lane)]);
    const int depth = depth_of(layout());
    const Digit digit = digits[input % depth];
    const char* from = panel + layout().codes(input / depth * depth / CHUNK, vec);
    if (layout().six_bits) {
      const int low = load_as<uint16_t>(from + digit.byte) >> digit.bit & (1 << digit.bits) - 1;
      const int high = load_as<uint16_t>(from + digit.high_byte) >> digit.high_bit;
      return (low | high << digit.bits & 63) + layout().scheme.least;
    }
    const int code = static_cast<uint8_t>(from[digit.byte]) >> digit.bit;
    if (layout().scheme.codes == RL_FOUR_BITS) return layout().scheme.table[code & 15];
    return static_cast<int8_t>(code);
  }

  const Codes codes_;
  const char* packed_;
  const int inputs_;
};

template <class T>
void pack(Team& team, int outputs, int inputs, int parts, const RlScheme* schemes, int part,
          const RlSource& source, void* packed) {
  const Panels<T> panels(outputs * parts, inputs, parts == 2);
  const Packer<T> packer(panels, schemes, part, source);
  team.run([&](Crew& crew) {
    crew.each(panels.panels, [&](int index) { packer.pack(index, static_cast<char*>(packed)); });
  });
}

template <class T>
int64_t bytes(int outputs, int inputs, int parts, const RlScheme* schemes) {
  const Panels<T> panels(outputs * parts, inputs, parts == 2);
  return panels.panels * Codes(panels, schemes).bytes();
}

template <class T>
void read_rows(const RlLinear& weights, const int32_t* rows, int count, float* to) {
  const Panels<T> panels(weights.outputs, weights.inputs, false);
  const RowReader<T> reader(panels, weights);
  for (int i = 0; i < count; i++)
    reader.read(rows[i], to + static_cast<size_t>(i) * weights.inputs);
}

}  // namespace
}  // namespace rootlace

extern "C" {

int64_t rl_codes_bytes(int32_t dtype, int32_t outputs, int32_t inputs, int32_t parts,
                       const RlScheme* schemes) {
  using namespace rootlace;
  auto one = dtype == RL_FLOAT32 ? bytes<float> : bytes<bf16>;
  return one(outputs, inputs, parts, schemes);
}

int32_t rl_rows(int32_t dtype, const RlLinear* weights, const int32_t* rows, int32_t count,
                float* to) {
  using namespace rootlace;
  auto one = dtype == RL_FLOAT32 ? read_rows<float> : read_rows<bf16>;
  return guarded([&] { one(*weights, rows, count, to); });
}

int32_t rl_pack_codes(rootlace::Team* team, int32_t dtype, int32_t outputs, int32_t inputs,
                      int32_t parts, const RlScheme* schemes, int32_t part, const RlSource* source,
                      void* packed) {
  using namespace rootlace;
  auto one = dtype == RL_FLOAT32 ? pack<float> : pack<bf16>;
  return guarded([&] { one(*team, outputs, inputs, parts, schemes, part, *source, packed); });
}
}
