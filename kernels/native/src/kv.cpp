// Writes to a cache, for callers that compute layers themselves.
#include "attention.h"
#include "guard.h"
#include "kv_layout.h"
#include "rows.h"

namespace {

using namespace rootlace;

template <class Call>
int32_t with_type(int32_t dtype, Call&& call) {
  return guarded([&] {
    if (dtype == RL_BFLOAT16)
      call(bf16{});
    else
      call(0.0f);
  });
}

}  // namespace

extern "C" {

int32_t rl_write_kv(void* team, int32_t dtype, int32_t kv_heads, int32_t head_dim,
                    int32_t block_size, int32_t count, const int64_t* slots, const int64_t* tokens,
                    const void* k, int64_t k_stride, const void* v, int64_t v_stride, void* k_cache,
                    void* v_cache) {
  return with_type(dtype, [&](auto one) {
    using T = decltype(one);
    const KvLayout<T> layout{kv_heads, head_dim, block_size};
    static_cast<Team*>(team)->run([&](Crew& crew) {
      each_row(crew, count, [&](int i) {
        const int64_t token = tokens ? tokens[i] : i;
        const T* key = static_cast<const T*>(k) + token * k_stride;
        const T* value = static_cast<const T*>(v) + token * v_stride;
        for (int head = 0; head < kv_heads; head++, key += head_dim, value += head_dim) {
          layout.put_key(static_cast<T*>(k_cache), slots[i], head, key);
          layout.put_value(static_cast<T*>(v_cache), slots[i], head, value);
        }
      });
    });
  });
}

int32_t rl_copy_kv(void* team, int32_t dtype, int32_t kv_heads, int32_t head_dim,
                   int32_t block_size, int32_t count, const int64_t* from, const int64_t* to,
                   int32_t parts, int64_t part_bytes, void* cache) {
  return with_type(dtype, [&](auto one) {
    using T = decltype(one);
    const KvLayout<T> layout{kv_heads, head_dim, block_size};
    static_cast<Team*>(team)->run([&](Crew& crew) {
      each_row(crew, parts, [&](int part) {
        T* own = reinterpret_cast<T*>(static_cast<char*>(cache) + part * part_bytes);
        for (int i = 0; i < count; i++) layout.copy_slot(own, from[i], to[i], part % 2 == 0);
      });
    });
  });
}
}
