// Weights that are codes, into panels: see codes.h.
#include <cstring>

#include "codes.h"
#include "guard.h"
#include "linear.h"
#include "panels.h"
#include "tile_codes.h"

namespace rootlace {
namespace {

// Packs the codes of one part of a matrix. Rows of the source are its outputs.
template <class T, class Packing>
class Packer {
 public:
  Packer(const Packing& panels, const RlScheme* schemes, int part, const RlSource& source)
      : panels_(panels), codes_(panels, schemes), part_(part), source_(source) {
    group_ = layout().scheme.group ? layout().scheme.group : panels.inputs;
    groups_ = panels.inputs / group_;
  }

  // A panel; behind the last columns and inputs, codes and scales are zero.
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
      const int chunks = layout().by_column ? 2 : 1;
      for (int chunk = 0; chunk * CHUNK < panels_.inputs; chunk += chunks)
        put_codes(panel + layout().codes(chunk, column / LANES), first + column, column % LANES,
                  chunk * CHUNK);
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

  // Those of a column's inputs from `input` on, at most a chunk of them, or two side by side.
  void put_codes(char* to, size_t output, int lane, int input) const {
    const bool by_column = layout().by_column;
    const int depth = std::min(by_column ? 2 * CHUNK : CHUNK, panels_.inputs - input);
    const auto* values = static_cast<const uint8_t*>(source_.values);
    if (layout().scheme.codes != RL_FOUR_BITS) {
      const uint8_t* from = values + output * panels_.inputs + input;
      const int word = layout().grouped ? SHORT_WORD : STEP<T>;
      const int moved = layout().grouped && Isa::SHORT_PARTS == 2 ? Isa::SHORT_SHIFT : 0;
      const size_t row = layout().grouped ? layout().vecs * layout().word_bytes() : LANES * word;
      for (int i = 0; i < depth; i++)
        to[i / word * row + lane * word + i % word] = static_cast<char>(from[i] + moved);
      return;
    }
    const uint8_t* from = values + (output * panels_.inputs + input) / 2;
    for (int i = 0; i < depth; i++) {
      const uint32_t code = from[i / 2] >> 4 * (i % 2) & 15;
      if (by_column) {
        TileCodes::put(to, lane, i, code);
        continue;
      }
      if (layout().grouped) {
        // Of a word's 32 bits, SHORT_WORD inputs have as many each; those of the words that follow
        // are their higher digits.
        constexpr int DIGITS = 8 / SHORT_WORD;
        const int row = i / SHORT_WORD, digit = i % SHORT_WORD * DIGITS + row % DIGITS;
        char& byte = to[row / DIGITS * layout().vecs * layout().word_bytes() + lane * 4 + digit / 2];
        byte = static_cast<char>(byte | code << digit % 2 * 4);
        continue;
      }
      const int row = i / STEP<T>, word = row / 8 * LANES + lane * STEP<T> + i % STEP<T>;
      uint32_t digits;
      std::memcpy(&digits, to + word * 4, 4);
      digits |= code << 4 * (row % 8);
      std::memcpy(to + word * 4, &digits, 4);
    }
  }

  const Packing& panels_;
  const Codes codes_;
  const int part_;
  const RlSource& source_;
  int group_, groups_;
};

template <class T>
void pack(Team& team, int32_t path, int outputs, int inputs, int parts, const RlScheme* schemes,
          int part, const RlSource& source, void* packed) {
  with_panels<T>(path, outputs * parts, inputs, parts == 2, [&](const auto& panels) {
    const Packer<T, std::decay_t<decltype(panels)>> packer(panels, schemes, part, source);
    team.run([&](Crew& crew) {
      crew.each(panels.panels, [&](int index) { packer.pack(index, static_cast<char*>(packed)); });
    });
  });
}

template <class T>
int64_t bytes(int32_t path, int outputs, int inputs, int parts, const RlScheme* schemes) {
  return with_panels<T>(path, outputs * parts, inputs, parts == 2, [&](const auto& panels) {
    return panels.panels * Codes(panels, schemes).bytes();
  });
}

}  // namespace
}  // namespace rootlace

extern "C" {

int64_t rl_codes_bytes(int32_t dtype, int32_t path, int32_t outputs, int32_t inputs, int32_t parts,
                       const RlScheme* schemes) {
  using namespace rootlace;
  auto one = dtype == RL_FLOAT32 ? bytes<float> : bytes<bf16>;
  return one(path, outputs, inputs, parts, schemes);
}

int32_t rl_pack_codes(rootlace::Team* team, int32_t dtype, int32_t path, int32_t outputs,
                      int32_t inputs, int32_t parts, const RlScheme* schemes, int32_t part,
                      const RlSource* source, void* packed) {
  using namespace rootlace;
  auto one = dtype == RL_FLOAT32 ? pack<float> : pack<bf16>;
  return guarded([&] { one(*team, path, outputs, inputs, parts, schemes, part, *source, packed); });
}
}
