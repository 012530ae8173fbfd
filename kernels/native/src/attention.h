// Causal attention of a step's tokens over their rows' paged keys and values.
//
// Formula: kernels/reference/attention.py. Softmax is online (Milakov & Gimelshein 2018; Dao et al.
// 2022, "FlashAttention") over blocks of KEY_BLOCK keys at fixed absolute positions, and starts
// anew every SEGMENT keys; the segments of a context are merged by their log-sum-exps, in order. So
// what is computed in one task, cut into many, or shared by rows has the same bits.
#pragma once

#include <vector>

#include "api.h"
#include "team.h"
#include "vec.h"

namespace rootlace {

constexpr int KEY_BLOCK = 64;
constexpr int SEGMENT = 1024;

struct AttentionShape {
  int heads, kv_heads, head_dim, block_size;
};

// Attention of some tokens over some key blocks, for some key heads.
struct AttentionTask {
  int first, last;      // of AttentionPlan::tokens
  int row;              // whose block table says where the keys are
  int kv_begin, kv_end;  // key heads
  int low, high;        // key blocks
  bool finish;          // the tokens' last keys: write the output; else keep the state
  float cost;
};

// Who computes what: made once per step, the same for all layers. Reusable: a plan made again
// allocates nothing that fits into what it had.
class AttentionPlan {
 public:
  // `rows` is kept and must outlive the plan's use. Not thread-safe.
  void make(const AttentionShape& shape, const RlRows& rows, int threads);

  struct Token {
    int token, position;
  };

  AttentionShape shape;
  RlRows rows;
  std::vector<Token> tokens;
  std::vector<AttentionTask> tasks;  // phase by phase, biggest first
  std::vector<int> phase_end;        // every phase needs what those before it computed
  // States that are carried from task to task: token t's of head h and segment s is record
  // first_record[t] + h * segments[t] + s.
  std::vector<int> first_record, segments;
  std::vector<float> records;
  int record_size;  // floats
};

// q: the heads of token t are `heads` x `head_dim` numbers from q + t * q_stride on; out likewise.
// k_cache, v_cache: [blocks, block_size, kv_heads, head_dim] of one layer, this step's tokens
// included. `window`: a token sees itself and window - 1 tokens before it; 0: all. `scale` > 0.
// lse: [tokens, heads], natural log-sum-exp of the scores, or null.
template <class T>
struct AttentionCall {
  const T* q;
  size_t q_stride;
  const T* k_cache;
  const T* v_cache;
  int window;
  float scale;
  T* out;
  size_t out_stride;
  float* lse;
};

// Called by all threads of a region with the same arguments. T: float or bf16. `plan` holds the
// states of the call that is running: one call at a time.
template <class T>
void attention(Crew& crew, AttentionPlan& plan, const AttentionCall<T>& call);

}  // namespace rootlace
