// Causal attention of a step's tokens over their rows' paged keys and values.
//
// Formula: kernels/reference/attention.py. Softmax is online (Milakov & Gimelshein 2018; Dao et al.
// 2022, "FlashAttention") over blocks of KEY_BLOCK keys at fixed absolute positions. Softmax starts
// anew every SEGMENT keys; the segments of a context are merged by their log-sum-exps, in order. So
// the bits are the same in one task, cut into many tasks, or shared by rows.
#pragma once

#include "attention_plan.h"
#include "team.h"
#include "vec.h"

namespace rootlace {

// Arguments of attention.
//
// - q: the heads of token t are `heads` x `head_dim` numbers from q + t * q_stride on; out likewise,
//   with value_dim numbers per head.
// - k_cache, v_cache: [blocks, block_size, kv_heads, head_dim] of one layer in KvLayout, this step's
//   tokens included; with `bits`, integers in blocks of KvCodes. Both may be the same cache.
// - `window`: a token sees itself and window - 1 tokens before it; 0: all tokens before it.
// - Scores are scale * q . k, with `scale` > 0, then, with a `cap` c > 0, c tanh(score / c).
// - `unseen`: the first positions of a row, which no token attends to. No token has such a position.
// - lse: [tokens, heads], natural log-sum-exp of the scores, or null.
template <class T>
struct AttentionCall {
  const T* q;
  size_t q_stride;
  const void* k_cache;
  const void* v_cache;
  int bits;
  int window, unseen;
  float scale, cap;
  T* out;
  size_t out_stride;
  float* lse;
  const float* sinks;  // [heads], scores of an additional key without a value; or null
};

// Computes attention. All threads of a region call this with the same arguments; it uses the crew's
// scratch. T: float or bf16. `plan` holds the states of the running call, so one call runs at a
// time.
template <class T>
void attention(Crew& crew, AttentionPlan& plan, const AttentionCall<T>& call);

}  // namespace rootlace

extern "C" {

// Computes attention in `layers` layers in one region. The layers differ in their caches only,
// which are `layer_stride` bytes apart; `kv_bits` as in RlModel. q [tokens, heads, head_dim] with
// tokens q_stride apart, out [tokens, heads, head_dim].
RL_API int32_t rl_attention(void* team, int32_t dtype, int32_t heads, int32_t kv_heads,
                            int32_t head_dim, int32_t block_size, int32_t kv_bits,
                            const RlRows* rows, const void* q,
                            int64_t q_stride, const void* k_cache, const void* v_cache,
                            int32_t layers, int64_t layer_stride, int32_t window, float scale,
                            float cap, void* out, float* lse);

// Writes keys and values [tokens, kv_heads, head_dim] to one layer's caches in KvLayout: number i, of
// token `tokens[i]` (null: i), to slots[i]. Tokens lie k_stride and v_stride numbers apart.
RL_API int32_t rl_write_kv(void* team, int32_t dtype, int32_t kv_heads, int32_t head_dim,
                           int32_t block_size, int32_t count, const int64_t* slots,
                           const int64_t* tokens, const void* k, int64_t k_stride, const void* v,
                           int64_t v_stride, void* k_cache, void* v_cache);

// Copies slots `from` to slots `to` in `parts` adjacent caches of `part_bytes` each, keys and
// values in turns.
RL_API int32_t rl_copy_kv(void* team, int32_t dtype, int32_t kv_heads, int32_t head_dim,
                          int32_t block_size, int32_t count, const int64_t* from,
                          const int64_t* to, int32_t parts, int64_t part_bytes, void* cache);
}
