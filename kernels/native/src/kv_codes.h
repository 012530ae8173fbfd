// Keys and values as integers with scales beside them: kernels/reference/kv_codes.py says which.
//
// A block has as many bytes as rows of its slots, and they lie as attention unpacks them, head by
// head, with two codes of a key in a word of 2 BITS bits; behind them the scales and offsets:
//     keys:   [kv_heads][block_size / LANES][head_dim / 2][LANES]
//     values: [kv_heads][block_size][head_dim]; codes of 4 bits: d, and d + head_dim / 2 above it
//     words:  [kv_heads][block_size]
// Blocks hold whole panels of LANES keys, heads are a multiple of 2 LANES numbers. No byte belongs to
// two slots, so threads may write neighbours at the same time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "key_block.h"
#include "tile.h"
#include "vec.h"

namespace rootlace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

// The integers that one head of a token is rounded to.
struct Rounded {
  uint8_t codes[MAX_HEAD_DIM];
  uint32_t word;  // scale and, above it, offset: both bfloat16
};

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

template <class T>
inline void round_to_codes(const T* x, int dim, int bits, Rounded& out) {
  const float most = static_cast<float>((1 << bits) - 1);
  Vec low = load(x), high = low, differences = {};
  for (int d = 0; d < dim; d += LANES) {
    const Vec v = load(x + d);
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
  for (int d = 0; d < dim; d += LANES) {
    // The bounds stand between product and sum, which else might be rounded as one.
    Vec scaled = (load(x + d) - offset) * inverse;
    scaled = scaled < 0.0f ? Vec{} : scaled;
    scaled = scaled > most ? splat(most) : scaled;
    const Vec whole = scaled + 12582912.0f;  // 1.5 * 2^23: the last bits are the number
    const Words codes = reinterpret_cast<Words>(whole) & ((1u << bits) - 1);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Halves), Bytes);
    std::memcpy(out.codes + d, &bytes, sizeof bytes);
  }
  out.word = bits_of(scale + strange) >> 16 | (bits_of(offset + strange) & 0xffff0000u);
}

// Where a key block's codes are, of one key head: panel by panel, and the words of each.
struct CodePanels {
  const uint8_t *keys[PANELS], *values[PANELS];
  const uint32_t *key_words[PANELS], *value_words[PANELS];
};

struct KvCodes {
  int kv_heads, head_dim, block_size, bits;

  int row() const { return head_dim * bits / 8; }
  // Bytes; see `slot_bytes` of the reference.
  int64_t block() const {
    const int slot = (kv_heads * (row() + 4) + 15) / 16 * 16;
    return static_cast<int64_t>(block_size) * slot;
  }

  // Where the codes of `slot` begin: of keys, only that of a panel's first one.
  int64_t codes(int64_t slot, int head) const {
    return slot / block_size * block() + in_block(slot, head) * row();
  }
  int64_t words(int64_t slot, int head) const {
    const int64_t all = static_cast<int64_t>(block_size) * kv_heads * row();
    return slot / block_size * block() + all + in_block(slot, head) * 4;
  }

  void put_key(uint8_t* cache, int64_t slot, int head, const Rounded& key) const {
    const int lane = static_cast<int>(slot % LANES), pair = bits / 4;  // bytes of two codes
    uint8_t* to = cache + codes(slot - lane, head) + lane * pair;
    for (int d = 0; d < head_dim; d += 2, to += LANES * pair) {
      to[0] = key.codes[d];
      if (bits == 8)
        to[1] = key.codes[d + 1];
      else
        to[0] |= static_cast<uint8_t>(key.codes[d + 1] << 4);
    }
    put_word(cache, slot, head, key);
  }

  void put_value(uint8_t* cache, int64_t slot, int head, const Rounded& value) const {
    uint8_t* to = cache + codes(slot, head);
    for (int i = 0; i < row(); i++) {
      to[i] = value.codes[i];
      if (bits == 4) to[i] |= static_cast<uint8_t>(value.codes[i + row()] << 4);
    }
    put_word(cache, slot, head, value);
  }

  // Copies the first `slots` slots of a block.
  void copy(const uint8_t* from, uint8_t* to, int slots, bool keys) const {
    const int whole = keys ? slots / LANES * LANES : slots, pair = bits / 4;
    for (int head = 0; head < kv_heads; head++) {
      const int64_t at = codes(0, head), rest = at + static_cast<int64_t>(whole) * row();
      std::memcpy(to + at, from + at, static_cast<size_t>(whole) * row());
      for (int d = 0; whole < slots && d < head_dim / 2; d++)
        std::memcpy(to + rest + d * LANES * pair, from + rest + d * LANES * pair,
                    static_cast<size_t>(slots - whole) * pair);
      std::memcpy(to + words(0, head), from + words(0, head), static_cast<size_t>(slots) * 4);
    }
  }

 private:
  int64_t in_block(int64_t slot, int head) const {
    return static_cast<int64_t>(head) * block_size + slot % block_size;
  }
  void put_word(uint8_t* cache, int64_t slot, int head, const Rounded& x) const {
    std::memcpy(cache + words(slot, head), &x.word, 4);
  }
};

namespace detail {

// Scales and offsets of a register's words.
struct Scaling {
  Native scale, offset;
  explicit Scaling(NativeInts words)
      : scale((Native)(words << 16)), offset((Native)(words & static_cast<int32_t>(0xffff0000u))) {}
  Native operator()(NativeInts codes) const {
    return Isa::multiply_add(__builtin_convertvector(codes, Native), scale, offset);
  }
};

inline NativeInts splat_word(uint32_t word) {
  return static_cast<int32_t>(word) - NativeInts{};
}

inline void put_pairs(float* to, int apart, Native even, Native odd) {
  std::memcpy(to, &even, sizeof even);
  std::memcpy(to + apart, &odd, sizeof odd);
}
inline void put_pairs(bf16* to, int, Native even, Native odd) {
  const NativeInts both = Isa::pairs(even, odd);
  std::memcpy(static_cast<void*>(to), &both, sizeof both);
}

// A line of codes, and of what comes later: 64 bytes are fetched at a time.
inline void fetch_line(const uint8_t* next, int at) {
  if (next && at % 64 == 0) __builtin_prefetch(next + at);
}

// A panel of keys as KvLayout has it, from [dim / 2][LANES] words of two codes.
template <int BITS, class T>
inline void unpack_keys(const uint8_t* codes, const uint32_t* words, int dim, T* to,
                        const uint8_t* next) {
  constexpr int PAIR = BITS / 4, EACH = LANES / NATIVE;
  for (int part = 0; part < EACH; part++) {
    const Scaling scaling(load_as<NativeInts>(words + part * NATIVE));
    const uint8_t* from = codes + part * NATIVE * PAIR;
    T* at = to + part * NATIVE * STEP<T>;
    for (int d = 0; d < dim; d += 2, from += LANES * PAIR, at += 2 * LANES) {
      if (part == 0) fetch_line(next, d / 2 * LANES * PAIR);
      const NativeInts pair = BITS == 8 ? Isa::from_uint16(from) : Isa::from_uint8(from);
      put_pairs(at, LANES, scaling(pair & ((1 << BITS) - 1)), scaling(pair >> BITS));
    }
  }
}

// A line of a panel of values, from a row of codes: of two slots for bfloat16, else of the even one.
template <int BITS>
inline void unpack_values(const uint8_t* codes, const uint32_t* words, int dim, bf16* to,
                          const uint8_t* next) {
  const int row = dim * BITS / 8;
  const Scaling even(splat_word(words[0])), odd(splat_word(words[1]));
  for (int i = 0; i < row; i += NATIVE) {
    fetch_line(next, i);
    fetch_line(next, row + i);
    const NativeInts a = Isa::from_uint8(codes + i), b = Isa::from_uint8(codes + row + i);
    constexpr int MASK = (1 << BITS) - 1;
    put_pairs(to + 2 * i, 0, even(a & MASK), odd(b & MASK));
    if (BITS == 4) put_pairs(to + 2 * (row + i), 0, even(a >> 4), odd(b >> 4));
  }
}
template <int BITS>
inline void unpack_values(const uint8_t* codes, const uint32_t* words, int dim, float* to,
                          const uint8_t* next) {
  const int row = dim * BITS / 8;
  const Scaling scaling(splat_word(words[0]));
  for (int i = 0; i < row; i += NATIVE) {
    fetch_line(next, i);
    const NativeInts both = Isa::from_uint8(codes + i);
    const Native low = scaling(both & ((1 << BITS) - 1));
    std::memcpy(to + i, &low, sizeof low);
    if (BITS == 8) continue;
    const Native high = scaling(both >> 4);
    std::memcpy(to + row + i, &high, sizeof high);
  }
}

}  // namespace detail

// Makes panels of the first `count` keys and values. Meanwhile those of `next` are fetched, if there
// are any. What is behind the last key in its panel, or pair, may be anything.
template <int BITS, class T>
void unpack(const CodePanels& now, const CodePanels* next, int count, int dim, T* keys, T* values) {
  const int row = dim * BITS / 8;
  for (int panel = 0, first = 0; first < count; panel++, first += LANES) {
    if (next) {
      __builtin_prefetch(next->key_words[panel]);
      __builtin_prefetch(next->value_words[panel]);
    }
    detail::unpack_keys<BITS>(now.keys[panel], now.key_words[panel], dim, keys + first * dim,
                              next ? next->keys[panel] : nullptr);
    for (int i = 0; i < std::min(LANES, count - first); i += STEP<T>)
      detail::unpack_values<BITS>(now.values[panel] + i * row, now.value_words[panel] + i, dim,
                                  values + (first + i) * dim,
                                  next ? next->values[panel] + i * row : nullptr);
  }
}

}  // namespace rootlace
