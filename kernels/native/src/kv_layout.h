// Layout of keys and values in a block of the cache.
//
// In Python a block is [block_size, kv_heads, head_dim]. If it holds whole panels of LANES keys,
// and heads are whole vectors, the layout is that of attention's products, which then read the
// cache directly. The layout is head by head, with STEP numbers in a 32-bit word:
//     keys:   [kv_heads][block_size / LANES][head_dim / STEP][LANES][STEP]
//     values: [kv_heads][block_size / STEP][head_dim][STEP]
// A block's size and the start of each panel are the same as in Python's layout. With `plain`,
// blocks of any size have Python's layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tile.h"
#include "vec.h"

namespace rootlace {

template <class T>
struct KvLayout {
  int kv_heads, head_dim, block_size;
  bool plain = false;

  bool panels() const { return !plain && block_size % LANES == 0 && head_dim % LANES == 0; }
  int64_t block() const { return (int64_t)block_size * kv_heads * head_dim; }  // elements

  // Returns the start of the panel of `slot`, a multiple of LANES.
  int64_t panel(int64_t slot, int head) const {
    return slot / block_size * block() +
           ((int64_t)head * block_size + slot % block_size) * head_dim;
  }

  void put_key(T* cache, int64_t slot, int head, const T* key) const {
    if (!panels()) return put_row(cache, slot, head, key);
    int64_t first = slot / LANES * LANES;
    T* to = cache + panel(first, head) + (slot - first) * STEP<T>;
    for (int d = 0; d < head_dim; d += STEP<T>, to += LANES * STEP<T>)
      std::memcpy(to, key + d, 4);
  }

  // Number by number: another thread may write the other halves of the same words, and masked
  // stores are slower.
  void put_value(T* cache, int64_t slot, int head, const T* value) const {
    if (!panels()) return put_row(cache, slot, head, value);
    int64_t first = slot / LANES * LANES;
    int inside = static_cast<int>(slot - first), half = inside % STEP<T>;
    T* to = cache + panel(first, head) + (inside - half) * head_dim;
    for (int d = 0; d < head_dim; d++) to[d * STEP<T> + half] = value[d];
  }

  // Copies one slot to another.
  void copy_slot(T* cache, int64_t from, int64_t to, bool keys) const {
    const int together = keys ? LANES : STEP<T>;
    for (int head = 0; head < kv_heads; head++) {
      if (!panels()) {
        put_row(cache, to, head, cache + (from * kv_heads + head) * head_dim);
        continue;
      }
      const auto place = [&](int64_t slot) {
        const int64_t first = slot / together * together;
        return cache + panel(first, head) + (slot - first) * (keys ? STEP<T> : 1);
      };
      const T* source = place(from);
      T* target = place(to);
      if (keys)
        for (int d = 0; d < head_dim; d += STEP<T>)
          std::memcpy(target + d * LANES, source + d * LANES, 4);
      else
        for (int d = 0; d < head_dim; d++) target[d * STEP<T>] = source[d * STEP<T>];
    }
  }

  // Copies the first `slots` slots of a block; of words shared with other slots, their half.
  void copy(const T* from, T* to, int slots, bool keys) const {
    if (!panels()) {
      std::memcpy(to, from, sizeof(T) * slots * kv_heads * head_dim);
      return;
    }
    const int whole = keys ? slots / LANES * LANES : slots / STEP<T> * STEP<T>;
    for (int head = 0; head < kv_heads; head++) {
      int64_t at = (int64_t)head * block_size * head_dim, rest = at + (int64_t)whole * head_dim;
      std::memcpy(to + at, from + at, sizeof(T) * whole * head_dim);
      if (whole == slots) continue;
      const int stride = keys ? LANES * STEP<T> : STEP<T>;
      const size_t bytes = keys ? (slots - whole) * 4 : sizeof(T);
      for (int i = 0; i < (keys ? head_dim / STEP<T> : head_dim); i++)
        std::memcpy(to + rest + i * stride, from + rest + i * stride, bytes);
    }
  }

 private:
  void put_row(T* cache, int64_t slot, int head, const T* row) const {
    std::memcpy(cache + (slot * kv_heads + head) * head_dim, row, head_dim * sizeof(T));
  }
};

}  // namespace rootlace
