// Keys and values as integers with scales: kernels/reference/kv_cache.py has the formulas.
//
// A block has the bytes of its slots' rows, in the order in which attention reads numbers of 16
// bits. Head by head, a slot has `row` bytes of codes; the scales and offsets follow all codes:
//     keys:   [kv_heads][block_size / LANES][row / 2][LANES][2]
//     values: [kv_heads][block_size / 2][row][2]
//     words:  [kv_heads][groups][block_size]
// Blocks hold whole panels of LANES keys. Heads are a multiple of 2 LANES numbers, so they have
// whole groups (of LANES bytes with codes of 4 bits). No byte belongs to two slots, so threads may
// write neighbours at the same time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "attention_softmax.h"
#include "key_block.h"
#include "vec.h"

namespace rootlace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Codes of one head of a token, as a slot's row of bytes.
struct Rounded {
  uint8_t row[MAX_HEAD_DIM];
  uint32_t words[MAX_HEAD_DIM / (2 * LANES)];  // per group: scale and, above it, offset, both bfloat16
};

inline int kv_groups(int dim, int bits) { return bits == 8 ? 1 : dim / (2 * LANES); }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Sums and differences of numbers at this distance.
template <int DISTANCE>
inline void mix_neighbours(float* x, int size) {
  for (int i = 0; i < size; i += 2 * DISTANCE)
    for (int j = i; j < i + DISTANCE; j++) {
      const float first = x[j], second = x[j + DISTANCE];
      x[j] = first + second;
      x[j + DISTANCE] = first - second;
    }
}

// Mixes queries or keys in place, as `mixed` of the reference, before keys are rounded. A half of
// a head is a multiple of LANES.
template <class T>
inline void mix(T* x, int dim) {
  alignas(64) float head[MAX_HEAD_DIM];
  convert(x, dim, head);
  mix_neighbours<1>(head, dim);
  mix_neighbours<2>(head, dim);
  mix_neighbours<4>(head, dim);
  mix_neighbours<8>(head, dim);
  const int half = dim / 2, together = half & -half;
  const auto mix_vectors = [&](int distance) {
    for (int i = 0; i < dim; i += 2 * distance)
      for (int j = i; j < i + distance; j += LANES) {
        const Vec first = load(head + j), second = load(head + j + distance);
        store(head + j, first + second);
        store(head + j + distance, first - second);
      }
  };
  for (int distance = LANES; distance < together; distance *= 2) mix_vectors(distance);
  mix_vectors(half);
  const float factor = static_cast<float>(1 / std::sqrt(2.0 * together));
  for (int i = 0; i < dim; i += LANES) store(x + i, load(head + i) * factor);
}

template <class T>
inline void round_to_codes(const T* x, int dim, int bits, Rounded& out) {
  const float most = static_cast<float>((1 << bits) - 1);
  // Offsets of a group's vectors.
  const int groups = kv_groups(dim, bits), apart = bits == 8 ? LANES : dim / 2;
  const int count = bits == 8 ? dim / LANES : 2;
  for (int group = 0; group < groups; group++) {
    const T* from = x + group * LANES;
    Vec low = load(from), high = low, differences = {};
    for (int i = 0; i < count; i++) {
      const Vec v = load(from + i * apart);
      low = v < low ? v : low;
      high = max_of(v, high);
      differences += v - v;
    }
    const float strange = sum(differences);  // 0, or NaN
    uint32_t pattern = bits_of(-max_of(-low));
    if (pattern >> 31) pattern += 0xffff;
    const float offset = float_of(pattern & 0xffff0000u);
    float scale = float_of((bits_of((max_of(high) - offset) / most) + 0xffff) & 0xffff0000u);
    if (scale < 0x1p-100f) scale = 0;
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < count; i++) {
      // The bounds between product and sum keep the compiler from fusing them, which would round
      // once.
      Vec scaled = (load(from + i * apart) - offset) * inverse;
      scaled = scaled < 0.0f ? Vec{} : scaled;
      scaled = scaled > most ? splat(most) : scaled;
      const Vec whole = scaled + 12582912.0f;  // 1.5 * 2^23: the last bits are the rounded number
      const Words codes = reinterpret_cast<Words>(whole) & ((1u << bits) - 1);
      const Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Halves), Bytes);
      std::memcpy(out.row + group * LANES + i * apart, &bytes, sizeof bytes);
    }
    out.words[group] = bits_of(scale + strange) >> 16 | (bits_of(offset + strange) & 0xffff0000u);
  }
  if (bits == 4)
    for (int i = 0; i < dim / 2; i++) out.row[i] |= static_cast<uint8_t>(out.row[i + dim / 2] << 4);
}

// Addresses of a key block's codes, for one key head: each panel's codes, and its first group's
// words.
struct CodePanels {
  const uint8_t *keys[PANELS], *values[PANELS];
  const uint32_t *key_words[PANELS], *value_words[PANELS];
  int apart;  // distance of two groups' words, in words
};

struct KvCodes {
  int kv_heads, head_dim, block_size, bits;

  int row() const { return head_dim * bits / 8; }
  int groups() const { return kv_groups(head_dim, bits); }
  // Returns the bytes of a slot; see `slot_bytes` of the reference.
  int64_t block() const {
    const int slot = (kv_heads * (row() + 4 * groups()) + 15) / 16 * 16;
    return static_cast<int64_t>(block_size) * slot;
  }

  // Returns the start of the codes of `slot`: for keys a panel's first slot, for values an even
  // slot.
  int64_t codes(int64_t slot, int head) const {
    return slot / block_size * block() +
           (static_cast<int64_t>(head) * block_size + slot % block_size) * row();
  }
  // Returns the place of the first group's word; the groups' words are 4 block_size bytes apart.
  int64_t words(int64_t slot, int head) const {
    const int64_t all = static_cast<int64_t>(block_size) * kv_heads * row();
    const int64_t before = static_cast<int64_t>(head) * groups() * block_size;
    return slot / block_size * block() + all + (before + slot % block_size) * 4;
  }

  void put_key(uint8_t* cache, int64_t slot, int head, const Rounded& key) const {
    const int lane = static_cast<int>(slot % LANES);
    uint8_t* to = cache + codes(slot - lane, head) + 2 * lane;
    for (int i = 0; i < row(); i += 2, to += 2 * LANES) std::memcpy(to, key.row + i, 2);
    put_words(cache, slot, head, key);
  }

  void put_value(uint8_t* cache, int64_t slot, int head, const Rounded& value) const {
    uint8_t* to = cache + codes(slot - slot % 2, head) + slot % 2;
    for (int i = 0; i < row(); i++) to[2 * i] = value.row[i];
    put_words(cache, slot, head, value);
  }

  // Copies the first `slots` slots of a block.
  void copy(const uint8_t* from, uint8_t* to, int slots, bool keys) const {
    const int together = keys ? LANES : 2, whole = slots / together * together;
    const int lines = keys ? row() / 2 : row(), apart = keys ? 2 * LANES : 2;
    const size_t rest = static_cast<size_t>(slots - whole) * (keys ? 2 : 1);
    for (int head = 0; head < kv_heads; head++) {
      const int64_t at = codes(0, head), behind = at + static_cast<int64_t>(whole) * row();
      std::memcpy(to + at, from + at, static_cast<size_t>(whole) * row());
      for (int i = 0; rest && i < lines; i++)
        std::memcpy(to + behind + i * apart, from + behind + i * apart, rest);
      for (int group = 0; group < groups(); group++) {
        const int64_t word = words(0, head) + static_cast<int64_t>(group) * block_size * 4;
        std::memcpy(to + word, from + word, static_cast<size_t>(slots) * 4);
      }
    }
  }

 private:
  void put_words(uint8_t* cache, int64_t slot, int head, const Rounded& x) const {
    uint8_t* to = cache + words(slot, head);
    for (int group = 0; group < groups(); group++, to += 4 * block_size)
      std::memcpy(to, &x.words[group], 4);
  }
};

namespace detail {

constexpr int LINE = 2 * LANES;  // bytes, each with one or two codes
constexpr int PARTS_OF_LINE = LINE / NATIVE;

// Scales and offsets for the codes of a register.
struct Scaling {
  Native scale, offset;
  Scaling() = default;
  explicit Scaling(NativeInts words)
      : scale((Native)(words << 16)), offset((Native)(words & static_cast<int32_t>(0xffff0000u))) {}
  Native operator()(NativeInts codes) const {
    return Isa::multiply_add(__builtin_convertvector(codes, Native), scale, offset);
  }
};

inline NativeInts splat_word(uint32_t word) { return static_cast<int32_t>(word) - NativeInts{}; }

// bfloat16: unpacks a line to a line of numbers in the same order. With codes of 4 bits the upper
// halves become another line, `apart` numbers behind. `scalings`: one for each register of a line.
template <int BITS, class Scalings>
[[gnu::always_inline]] inline void unpack_line(const uint8_t* from, const Scalings& scalings,
                                               bf16* to, int apart) {
  Native low[PARTS_OF_LINE], high[PARTS_OF_LINE];
#pragma GCC unroll 8
  for (int j = 0; j < PARTS_OF_LINE; j++) {
    const NativeInts codes = Isa::from_uint8(from + j * NATIVE);
    low[j] = scalings[j](BITS == 8 ? codes : codes & 15);
    if (BITS == 4) high[j] = scalings[j](codes >> 4);
  }
  Isa::narrow_row(to, low);
  if (BITS == 4) Isa::narrow_row(to + apart, high);
}

// float: unpacks a line to two lines, of the even bytes and of the odd bytes.
template <int BITS, class Scalings>
[[gnu::always_inline]] inline void unpack_line(const uint8_t* from, const Scalings& even,
                                               const Scalings& odd, float* to, int odd_at,
                                               int apart) {
  for (int part = 0; part < LANES / NATIVE; part++, to += NATIVE) {
    const NativeInts both = Isa::from_uint16(from + 2 * part * NATIVE);
    auto put = [](float* at, Native x) { std::memcpy(at, &x, sizeof x); };
    constexpr int MASK = (1 << BITS) - 1;
    put(to, even[part](both & MASK));
    put(to + odd_at, odd[part](both >> 8 & MASK));
    if (BITS == 8) continue;
    put(to + apart, even[part](both >> 4 & MASK));
    put(to + odd_at + apart, odd[part](both >> 12));
  }
}

// Fetches 64 bytes at a time.
inline void fetch_line(const uint8_t* next, int at) {
  if (next && at % 64 == 0) __builtin_prefetch(next + at, 0, 2);
}

// Unpacks a panel of keys to KvLayout. Lines have two bytes of each key.
template <int BITS>
inline void unpack_keys(const uint8_t* codes, const uint32_t* words, int apart, int dim, bf16* to,
                        const uint8_t* next) {
  Scaling scalings[PARTS_OF_LINE];
  const int bytes = dim * BITS / 8 * LANES, group = BITS == 8 ? bytes : LANES * LANES;
  for (int at = 0; at < bytes; at += LINE) {
    if (at % group == 0) {
      alignas(64) float twice[2 * LANES];  // each key's word for two numbers
      Isa::twice(load_as<Vec>(words), twice);
      for (int j = 0; j < PARTS_OF_LINE; j++)
        scalings[j] = Scaling(load_as<NativeInts>(twice + j * NATIVE));
      words += apart;
    }
    fetch_line(next, at);
    unpack_line<BITS>(codes + at, scalings, to + at, dim / 2 * LANES);
  }
}
template <int BITS>
inline void unpack_keys(const uint8_t* codes, const uint32_t* words, int apart, int dim, float* to,
                        const uint8_t* next) {
  Scaling scalings[LANES / NATIVE];
  const int bytes = dim * BITS / 8 * LANES, group = BITS == 8 ? bytes : LANES * LANES;
  for (int at = 0; at < bytes; at += LINE) {
    if (at % group == 0) {
      for (int j = 0; j < LANES / NATIVE; j++)
        scalings[j] = Scaling(load_as<NativeInts>(words + j * NATIVE));
      words += apart;
    }
    fetch_line(next, at);
    unpack_line<BITS>(codes + at, scalings, scalings, to + at, LANES, dim / 2 * LANES);
  }
}

// The same for each register.
struct Repeated {
  Scaling scaling;
  [[gnu::always_inline]] const Scaling& operator[](int) const { return scaling; }
};

// Lines of a panel of values, for two slots: LANES bytes of each slot (with codes of 4 bits, a
// group).
template <int BITS>
inline void unpack_values(const uint8_t* codes, const uint32_t* words, int apart, int dim, bf16* to,
                          const uint8_t* next) {
  const NativeInts odd = (load_as<NativeInts>(NUMBERS.at) & 1) != 0;
  const int bytes = dim * BITS / 4;
  Repeated scalings;
  for (int at = 0; at < bytes; at += LINE) {
    if (BITS == 4 || at == 0)
      scalings.scaling = Scaling(odd ? splat_word(words[1]) : splat_word(words[0]));
    words += apart;
    fetch_line(next, at);
    unpack_line<BITS>(codes + at, scalings, to + at, dim);
  }
}
template <int BITS>
inline void unpack_values(const uint8_t* codes, const uint32_t* words, int apart, int dim,
                          float* to, const uint8_t* next) {
  const int bytes = dim * BITS / 4;
  Repeated even, odd;
  for (int at = 0; at < bytes; at += LINE) {
    if (BITS == 4 || at == 0) {
      even.scaling = Scaling(splat_word(words[0]));
      odd.scaling = Scaling(splat_word(words[1]));
    }
    words += apart;
    fetch_line(next, at);
    unpack_line<BITS>(codes + at, even, odd, to + at / 2, dim, dim / 2);
  }
}

}  // namespace detail

// Unpacks panels of the first `count` keys and values, and meanwhile fetches the panels of `next`,
// if any. Numbers behind the last key in its panel, or pair, are undefined.
template <int BITS, class T>
void unpack(const CodePanels& now, const CodePanels* next, int count, int dim, T* keys, T* values) {
  const int row = dim * BITS / 8;
  for (int panel = 0, first = 0; first < count; panel++, first += LANES) {
    for (int group = 0; next && group < kv_groups(dim, BITS); group++) {
      __builtin_prefetch(next->key_words[panel] + group * next->apart, 0, 2);
      __builtin_prefetch(next->value_words[panel] + group * next->apart, 0, 2);
    }
    detail::unpack_keys<BITS>(now.keys[panel], now.key_words[panel], now.apart, dim,
                              keys + first * dim, next ? next->keys[panel] : nullptr);
    for (int i = 0; i < std::min(LANES, count - first); i += 2)
      detail::unpack_values<BITS>(now.values[panel] + i * row, now.value_words[panel] + i,
                                  now.apart, dim, values + (first + i) * dim,
                                  next ? next->values[panel] + i * row : nullptr);
  }
}

}  // namespace rootlace
