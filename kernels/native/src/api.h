// What Python sees: plain C structures and functions (`library.py` mirrors them).
//
// Pointers are owned by the caller. `dtype` of a model is that of its weights, activations between
// operators and KV cache; sums, norms and softmax are float32. Nothing here checks bounds: the
// Python side does.
#pragma once

#include <cstdint>

// What is not the interface is hidden (build.py): libraries for two instruction sets may be in one
// process, and the loader would give one of them the other's constants and tables.
#define RL_API __attribute__((visibility("default")))

extern "C" {

// How a call ended; `rl_error` has an exception's message. A function that creates something
// returns null instead. Where a call failed, contents of what it was to write are undefined.
enum RlStatus : int32_t { RL_DONE = 0, RL_NO_MEMORY = 1, RL_FAILED = 2 };

// The message of this thread's last failed call; valid until its next failed one.
RL_API const char* rl_error();

enum RlDtype : int32_t { RL_FLOAT32 = 0, RL_BFLOAT16 = 1 };

// What codes of weights are: int8, floats of eight bits (no NaN), places in a table, or int8 of which each is
// `least` to `least` + 63.
enum RlCodes : int32_t { RL_INT8 = 0, RL_E4M3 = 1, RL_FOUR_BITS = 2, RL_SIX_BITS = 3 };
enum RlNumbers : int32_t {
  RL_NO_NUMBERS = -1,
  RL_NUMBERS_FLOAT32 = 0,
  RL_NUMBERS_BFLOAT16 = 1,
  RL_NUMBERS_FLOAT16 = 2,  // finite
  RL_NUMBERS_INT8 = 3,
  RL_NUMBERS_UINT8 = 4
};

// What codes stand for (kernels/weights.py): code * scale + offset, in float32, then rounded.
struct RlScheme {
  int32_t codes;            // RlCodes
  int32_t group;            // inputs that share a scale, a multiple of 16; 0: all
  int32_t scales, offsets;  // RlNumbers that these are, before they are multiplied by units
  int32_t units;            // and units of both
  int32_t unit_groups;      // groups that share a unit; 1 without units
  int32_t least;            // of codes of six bits, else 0
  float table[16];          // of codes of four bits
};

// Weights that are to be packed, an output in each row: values [inputs], or [inputs / 2] of codes of
// four bits, the first one's in the lower half; scales and offsets [groups], units of scales and of
// offsets [groups / unit_groups]. Null: there are none.
struct RlSource {
  const void *values, *scales, *offsets, *units, *offset_units;
};

// y = x W^T + bias, W [outputs, inputs] packed by `rl_pack` or `rl_pack_codes`.
struct RlLinear {
  const void* packed;
  const float* bias;  // [outputs] or null
  int32_t inputs, outputs;
  const RlScheme* schemes;  // null: not codes; of gate and of up where these are packed together
  const int32_t* order;     // [inputs]: W's column i is for input order[i]; null: for input i
  float factor = 1;         // of y where a product is float32 (Epilogue's FLOAT32 and ADD)
  float alpha = 0, limit = 0;  // of Epilogue's CLAMPED_MUL
};

// [hidden] each. `weight` null: there is no norm; `bias` null: it has none.
struct RlNorm {
  const float *weight, *bias;
};

// As a layer's MLP; weights are in the order of the inputs.
struct RlExpert {
  RlLinear gate_up, down;
};

struct RlLayer {
  RlNorm input_norm, attention_out_norm;  // before and after attention
  RlNorm post_norm, mlp_out_norm;         // before and after the MLP
  // [head_dim] or, of all heads, [heads, head_dim]; or null. Of latent attention: see RlLatent.
  const float *q_norm, *k_norm;
  RlLinear qkv[3];   // [heads + 2 kv_heads] x head_dim rows, one behind the other
  RlLinear output;   // hidden rows
  RlLinear q_up;                // of latent attention with a query_rank, as these:
  const RlLinear *k_up, *v_up;  // [heads]
  // 2 inner rows, packed with the gate's and the up's columns side by side; of an MLP without a
  // gate, inner rows.
  RlLinear gate_up;
  RlLinear down;     // hidden rows
  // Of a layer with experts, whose gate_up and down are those of the MLP that all tokens have. Where
  // `packed` is null there is no such MLP, and no gate (of one output) that it is multiplied by.
  RlLinear router, shared_gate;
  const RlExpert* experts;  // [count] or null
  const float* correction;  // [count], added to shares in the choice of experts alone; or null
  const float* sinks;       // [heads], of attention; or null
  int32_t qkv_parts;
  int32_t window;    // a token sees itself and window - 1 before it; 0: all
  int32_t rotation;  // where the layer's numbers begin in a row of cos and sin; negative: no rotation
};

// Of `count` experts each token has `chosen`; `count` 0: there are none. They are in `groups`, of which
// those `chosen_groups` count that have the largest sum of their `best_of_group` best shares.
struct RlMixture {
  int32_t count, chosen, inner;
  int32_t normalised;  // whether shares are divided by their sum
  int32_t sigmoid;     // whether a share is a score's sigmoid, else they are all scores' softmax
  int32_t groups, chosen_groups, best_of_group;
  int32_t activation;  // a rootlace::Epilogue
  float factor;        // of what they add to the residual stream
};

// Latent attention: what is cached of a token is one vector of head_dim numbers for the one key head:
// `rank` numbers, which are values, too, and behind them those that are rotated. A layer's qkv gives the
// queries or, with a `query_rank`, so many numbers, normed with q_norm, of which q_up makes them; and
// behind these what is cached, of which k_norm norms the first `rank`. A head's query has `plain`
// numbers, of which its k_up makes `rank`, and the rotated ones; its v_up makes `values` numbers of the
// `rank` that it attends to. `rank` 0: attention is not latent.
struct RlLatent {
  int32_t rank, plain, values, query_rank;
  float eps;  // of these norms
};

// What an adapter adds to a product of x: (x a^T) b^T, its scale being in b, which is packed as the
// product's weights are: of qkv in as many parts. a.packed null: nothing.
struct RlLowRank {
  RlLinear a, b[3];
};

struct RlModel {
  int32_t dtype;
  int32_t hidden, heads, kv_heads, head_dim, inner, num_layers, vocab;
  int32_t activation;       // a rootlace::Epilogue: what follows gate_up
  int32_t layer_norms;      // whether norms are LayerNorm, else RMSNorm; heads' norms do not ask
  int32_t joint_norm;       // whether q_norm and k_norm norm all heads of a token together
  int32_t own_norms;        // whether they are LayerNorm, each head with numbers of its own
  int32_t parallel;         // whether attention and MLP read the same residual stream
  float eps, scale;         // of norms; of attention scores
  float score_cap;          // c > 0: scores are c tanh(score / c)
  float logit_cap;          // the same of logits
  float embedding_factor;   // what embeddings are multiplied by
  const void* embedding;    // [vocab, hidden], row-major
  const void* positions;    // [positions, hidden], added to embeddings; or null
  RlNorm final_norm;
  RlMixture mixture;
  RlLatent latent;
  const float* cos;         // [positions, rotation_stride]; a layer has head_dim / 2 of a row
  const float* sin;
  int64_t rotation_stride;
  const RlLayer* layers;
  RlLinear head;
  // [layers, 2, num_blocks, block_size, kv_heads, head_dim]; inside a block see kv_layout.h. With
  // `kv_bits` 8 or 4, integers: [layers, 2, num_blocks] blocks of kv_codes.h. Of latent attention:
  // [layers, 1, num_blocks, block_size, 1, head_dim], as it stands here.
  void* cache;
  int64_t num_blocks;
  int32_t block_size, kv_bits;
  int32_t unseen;           // slots at the beginning of a row's context that are not attended to
  // What adapters do to a layer's qkv, output, gate_up, down and q_up:
  // [adapters, num_layers, 5]; null: there are none.
  const RlLowRank* adapters;
  int32_t adapter_rank;  // the largest
  // Where several processes have a part of each layer: puts the sum of all their numbers in the place
  // of these, and returns 0, else the step fails. Null: this process has all.
  int32_t (*sum)(float* numbers, int64_t count);
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
  // positions outside its runs. With num_runs < 0, they are looked for.
  int32_t num_runs;
  const int32_t* runs;  // [num_runs, 4]: begin, end, low, high
};

// Where the time of a step goes.
enum RlPart : int32_t { RL_PLAN = 0, RL_ELEMENTWISE, RL_LINEAR, RL_ATTENTION, RL_PARTS };

// First copies, which are independent of each other, then layer by layer: keys and values of the
// T new tokens and of the M - T duplicates, then attention.
struct RlStep {
  int32_t tokens, writes, wanted, copies;  // T, M, N, C
  const int32_t* token_ids;        // [T]
  const int32_t* positions;        // [T]
  const int32_t* rotations;        // [T], rows of cos and sin
  const float* query_factors;      // [T], what queries are multiplied by once rotated; or null
  const int64_t* slots;            // [M], where keys and values go
  // [M], the token that goes to each slot, the first T in order; null: M = T.
  const int32_t* sources;
  const int32_t* wanted_tokens;    // [N], ascending or not; null: all (N = T)
  const int32_t* copied;           // [C, 3]: source block, target block, slots from the first on
  RlRows rows;
  const int32_t* adapters;  // [T], the number of each token's adapter, -1: none; null: no token's
  // Of a head that reads another model's states, instead of embeddings: the residual stream
  // [T, hidden], and what the first layer's products read [T, their inputs]; null: embeddings.
  const float* given_residual;
  const void* given_inputs;
  // Layers before which the residual stream of all tokens is wanted, and where it goes: out
  // [T, layers_wanted, hidden] of the model's dtype.
  int32_t layers_wanted;
  const int32_t* wanted_layers;
  void* states;
  float* residual;  // out [N, hidden], before the final norm; null: not wanted
  void* hidden;    // out [N, hidden], final-normed
  int64_t* nanos;  // [RL_PARTS], nanoseconds are added; null: not measured
};

// What `rl_forward` keeps between steps: its memory, which grows as steps do. One per model.
struct RlWorkspace;
RL_API RlWorkspace* rl_workspace_new();
RL_API void rl_workspace_free(RlWorkspace* workspace);

// All layers. `team` (here and below) is a rootlace::Team*.
RL_API int32_t rl_forward(void* team, RlWorkspace* workspace, const RlModel* model,
                          const RlStep* step);

// hidden[rows, hidden] -> logits[rows, vocab], and, unless `tokens` is null, the best token of each
// row: the largest logit, the smallest id among equals; -1 where it is not finite or a logit is NaN.
// Where there are `masks`, of the tokens that each row's allows: masks[row] is the address of
// ceil(vocab / 32) words (bit i of word w is token 32 w + i), or 0 where all are; logits that they
// exclude may be left as they are.
RL_API int32_t rl_logits(void* team, const RlModel* model, const void* hidden, int32_t rows,
                         const int64_t* masks, float* logits, int32_t* tokens);

// A number per row, `apart` bytes from one to the next.
struct RlColumn {
  const void* first;
  int64_t apart;
};

// `LogitEdits` of kernels/interface.py, whose arrays have those names; null: nothing of that kind.
struct RlEdits {
  const int32_t *bias_start, *bias_token;
  const float* bias;
  const int32_t* mask_table;
  int64_t mask_words;  // of a row of the table
  const int32_t* mask_row;
  const int32_t *seen_start, *seen_token, *seen_count;
  const RlColumn* penalties;  // those of `rl_penalties`
};

// The penalties that `rl_edit` reads, in order: "double repetition_penalty,double ..."
RL_API const char* rl_penalties();

// logits[rows, vocab] with the edits -> out[rows, vocab].
RL_API int32_t rl_edit(void* team, const float* logits, int32_t rows, int32_t vocab,
                       const RlEdits* edits, float* out);

// `PickRows` of kernels/interface.py.
struct RlPicks {
  RlColumn seed, position;    // int64_t
  const int32_t* mask_table;  // rows of ceil(vocab / 32) words
  RlColumn mask_row;          // int32_t, -1: everything is allowed; null: in all rows
  RlColumn params[];          // those of `rl_pick_params`
};

// The parameters that `rl_pick` reads, in order: "double temperature,double ..."
RL_API const char* rl_pick_params();

// One token of each of `rows` rows of `vocab`; -1 where there is no distribution.
RL_API int32_t rl_pick(void* team, const float* logits, int32_t rows, int32_t vocab,
                       const RlPicks* picks, int32_t* tokens);

// Of each of `rows` rows of `vocab`: the log-probability of its token, NaN where there is
// no such token; and ids and log-probabilities of its `top` (at most `vocab`) best, [rows, top].
RL_API int32_t rl_scores(void* team, const float* logits, int32_t rows, int32_t vocab,
                         const int32_t* tokens, int32_t top, float* logprobs, int32_t* top_ids,
                         float* top_logprobs);

// Asks the system for what this library's instructions need. 0, or the reason (an errno) why none of
// the other functions may be called.
RL_API int32_t rl_prepare();

// The instruction set that this library computes with: "amx", "avx512-bf16", "avx512", "avx2",
// "neon-bf16", "neon" or "generic"; one with "-twin" behind it where tests have it emulated.
RL_API const char* rl_instructions();

// The sizes of RlScheme, RlSource, RlLinear, RlNorm, RlExpert, RlLayer, RlMixture, RlLatent, RlLowRank,
// RlModel, RlRows, RlStep, RlEdits: what a mirror of them is checked against.
RL_API void rl_sizes(int64_t* sizes);

// Threads for all functions that take a team; see team.h.
RL_API void* rl_team_new(int32_t threads);
RL_API void rl_team_free(void* team);
RL_API int32_t rl_team_size(void* team);

// For tests: a region of `rounds` times `tasks` tasks of about `work` additions each. Adds to
// counts[rounds, tasks] how often each was run; returns how often a task saw one of the round
// before that was not done, -1 where the region threw.
RL_API int64_t rl_team_try(void* team, int32_t rounds, int32_t tasks, int64_t work,
                           int32_t* counts);

// For tests: a region of three rounds, in the second of which task `at` asks for `bytes` of scratch
// memory, or throws where they are negative.
RL_API int32_t rl_team_fail(void* team, int32_t tasks, int32_t at, int64_t bytes);

}
