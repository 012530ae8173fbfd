// What Python sees: plain C structures and functions (`library.py` mirrors them).
//
// Pointers are owned by the caller. `dtype` of a model is that of its weights, activations between
// operators and KV cache; sums, norms and softmax are float32. Nothing here checks bounds: the
// Python side does.
#pragma once

#include <cstdint>

namespace rootlace {
class Team;
}

extern "C" {

enum RlDtype : int32_t { RL_FLOAT32 = 0, RL_BFLOAT16 = 1 };

// y = x W^T + bias, W [outputs, inputs] packed by `rl_pack`.
struct RlLinear {
  const void* packed;
  const float* bias;  // [outputs] or null
  int32_t inputs, outputs;
};

struct RlLayer {
  const void* input_norm;  // [hidden], model's dtype, as all norms
  const void* q_norm;      // [head_dim] or null
  const void* k_norm;
  const void* post_norm;
  RlLinear qkv;      // [heads + 2 kv_heads] x head_dim rows
  RlLinear output;   // hidden rows
  RlLinear gate_up;  // 2 inner rows; packed with the gate's and the up's columns side by side
  RlLinear down;     // hidden rows
  int32_t window;    // a token sees itself and window - 1 before it; 0: all
};

struct RlModel {
  int32_t dtype;
  int32_t hidden, heads, kv_heads, head_dim, inner, num_layers, vocab;
  float eps, scale;         // of norms; of attention scores
  const void* embedding;    // [vocab, hidden], row-major
  const void* final_norm;   // [hidden]
  const float* cos;         // [positions, head_dim / 2]
  const float* sin;
  const RlLayer* layers;
  RlLinear head;
  void* cache;              // [layers, 2, num_blocks, block_size, kv_heads, head_dim]
  int64_t num_blocks;
  int32_t block_size;
};

// Attention's rows: row r owns the flat tokens row_start[r] : row_start[r + 1], the last ones of
// its context_len[r] tokens; position p of it lives in slot
// block_tables[r, p / block_size] * block_size + p % block_size.
struct RlRows {
  int32_t rows, width;          // R; columns of block_tables
  const int32_t* row_start;     // [R + 1]
  const int32_t* context_len;   // [R]
  const int32_t* block_tables;  // [R, width]
  // Runs of rows with leading blocks in common: rows begin : end share the blocks low : high of
  // their tables. Depth first, outer before inner; every row keeps at least its own new tokens'
  // positions outside its runs.
  int32_t num_runs;
  const int32_t* runs;  // [num_runs, 4]: begin, end, low, high
};

struct RlStep {
  int32_t tokens, writes, wanted;  // T, M, N
  const int32_t* token_ids;        // [T]
  const int32_t* positions;        // [T], rows of cos and sin
  const int64_t* slots;            // [M], where keys and values go
  const int32_t* sources;          // [M], the token that goes to each slot; null: M = T, in order
  const int32_t* wanted_tokens;    // [N], ascending or not; null: all (N = T)
  RlRows rows;
  void* hidden;  // out [N, hidden], final-normed
};

// The sizes of RlLinear, RlLayer, RlModel, RlRows, RlStep: what a mirror of them is checked against.
void rl_sizes(int64_t* sizes);

// Threads for all functions that take a team; see team.h.
rootlace::Team* rl_team_new(int32_t threads);
void rl_team_free(rootlace::Team* team);
int32_t rl_team_size(rootlace::Team* team);
int64_t rl_team_try(rootlace::Team* team, int32_t rounds, int32_t tasks, int64_t work,
                    int32_t* counts);

}
