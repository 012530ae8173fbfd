// Interface for Python: plain C structures and functions (`library.py` mirrors them).
//
// The caller owns all pointers. A model's `dtype` is the dtype of its weights, of activations
// between operators and of the KV cache; sums, norms and softmax are float32. Python checks all
// bounds; C++ checks none.
#pragma once

#include <cstdint>

// All other symbols are hidden (build.py). Libraries for two instruction sets may be in one
// process, and the loader would otherwise give one library the other's constants and tables.
#define RL_API __attribute__((visibility("default")))

extern "C" {

// Status of a call; `rl_error` has an exception's message. A function that creates an object
// returns null instead. After a failed call the contents of its outputs are undefined.
enum RlStatus : int32_t { RL_DONE = 0, RL_NO_MEMORY = 1, RL_FAILED = 2 };

// Message of this thread's last failed call; valid until the thread's next failed call.
RL_API const char* rl_error();

enum RlDtype : int32_t { RL_FLOAT32 = 0, RL_BFLOAT16 = 1 };

// Codes of weights: int8; floats of eight bits (no NaN); indices into a table; int8 in `least` ...
// `least` + 63.
enum RlCodes : int32_t { RL_INT8 = 0, RL_E4M3 = 1, RL_FOUR_BITS = 2, RL_SIX_BITS = 3 };
enum RlNumbers : int32_t {
  RL_NO_NUMBERS = -1,
  RL_NUMBERS_FLOAT32 = 0,
  RL_NUMBERS_BFLOAT16 = 1,
  RL_NUMBERS_FLOAT16 = 2,  // finite
  RL_NUMBERS_INT8 = 3,
  RL_NUMBERS_UINT8 = 4
};

// Values of codes (kernels/weights.py): code * scale + offset, in float32, then rounded.
struct RlScheme {
  int32_t codes;            // RlCodes
  int32_t group;            // inputs that share a scale, a multiple of 16; 0: all
  int32_t scales, offsets;  // RlNumbers, to be multiplied by units
  int32_t units;            // RlNumbers of the units of both
  int32_t unit_groups;      // groups that share a unit; 1 without units
  int32_t least;            // value to add to each unpacked code of six bits; else 0
  float table[16];          // values of codes of four bits
};

// Weights to pack, with a row for each output. Values [inputs], or [inputs / 2] for codes of four
// bits (the first code is the lower half); scales and offsets [groups]; units of scales and of
// offsets [groups / unit_groups]. Null: absent.
struct RlSource {
  const void *values, *scales, *offsets, *units, *offset_units;
};

// y = x W^T + bias, W [outputs, inputs] packed by `rl_pack` or `rl_pack_codes`.
struct RlLinear {
  const void* packed;
  const float* bias;  // [outputs] or null
  int32_t inputs, outputs;
  const RlScheme* schemes;  // null: dense; gated weights have two, of gate and of up
  const int32_t* order;     // [inputs]: W's column i belongs to input order[i]; null: to input i
  float factor = 1;         // multiplies y in float32 results (Epilogue's FLOAT32 and ADD)
  float alpha = 0, limit = 0;  // parameters of Epilogue's CLAMPED_MUL
};

// Norm, [hidden] each. `weight` null: no norm; `bias` null: no bias.
struct RlNorm {
  const float *weight, *bias;
};

// MLP of an expert, as a layer's MLP; weights are in the order of the inputs.
struct RlExpert {
  RlLinear gate_up, down;
};

struct RlLayer {
  RlNorm input_norm, attention_out_norm;  // before and after attention
  RlNorm post_norm, mlp_out_norm;         // before and after the MLP
  // [head_dim] or, for all heads, [heads, head_dim]; or null. For latent attention see RlLatent.
  const float *q_norm, *k_norm;
  RlLinear qkv[3];   // [heads + 2 kv_heads] x head_dim rows, one behind the other
  RlLinear output;   // hidden rows
  RlLinear q_up;                // for latent attention with a query_rank; also:
  const RlLinear *k_up, *v_up;  // [heads]
  // 2 inner rows, with the gate's and the up's columns packed side by side; inner rows for an MLP
  // without a gate.
  RlLinear gate_up;
  RlLinear down;     // hidden rows
  // For a layer with experts; its gate_up and down are the MLP shared by all tokens. `packed` null:
  // no shared MLP, or no shared_gate (of one output), which multiplies the MLP.
  RlLinear router, shared_gate;
  const RlExpert* experts;  // [count] or null
  const float* correction;  // [count], added to shares for the choice of experts only; or null
  const float* sinks;       // [heads], sinks of attention; or null
  int32_t qkv_parts;
  int32_t window;    // a token sees itself and window - 1 before it; 0: all
  int32_t rotation;  // offset of the layer's numbers in a row of cos and sin; negative: no rotation
};

// Mixture of `count` experts, of which each token has `chosen`; `count` 0: none. Experts are in
// `groups`. Only the `chosen_groups` groups with the largest sum of their `best_of_group` best
// shares count.
struct RlMixture {
  int32_t count, chosen, inner;
  int32_t normalised;  // whether shares are divided by their sum
  int32_t sigmoid;     // whether a share is a score's sigmoid; else shares are a softmax of scores
  int32_t groups, chosen_groups, best_of_group;
  int32_t activation;  // a rootlace::Epilogue
  float factor;        // multiplies the experts' output before the residual stream
};

// Latent attention. The cache has one vector of head_dim numbers per token, for the only key head:
// `rank` numbers, which are also the values, then the rotated numbers. The outputs of a layer's qkv
// begin with the queries. With a `query_rank` they begin with query_rank numbers instead, which
// q_norm norms and q_up turns into queries. The cached vector follows; k_norm norms its first
// `rank` numbers. A head's query has `plain` numbers, which its k_up turns into `rank`, and the
// rotated numbers. Its v_up turns the `rank` attended numbers into `values` numbers. `rank` 0:
// attention is not latent.
struct RlLatent {
  int32_t rank, plain, values, query_rank;
  float eps;  // of q_norm and k_norm
};

// Adapter's addition to a product of x: (x a^T) b^T, with the scale included in b. b is packed as
// the product's weights, for qkv in as many parts. a.packed null: no addition.
struct RlLowRank {
  RlLinear a, b[3];
};

struct RlModel {
  int32_t dtype;
  int32_t hidden, heads, kv_heads, head_dim, inner, num_layers, vocab;
  int32_t activation;       // a rootlace::Epilogue, applied after gate_up
  int32_t layer_norms;      // whether norms are LayerNorm, else RMSNorm; not for heads' norms
  int32_t joint_norm;       // whether q_norm and k_norm norm all heads of a token together
  int32_t own_norms;        // whether q_norm and k_norm are LayerNorm, with numbers per head
  int32_t parallel;         // whether attention and MLP read the same residual stream
  float eps, scale;         // of norms; of attention scores
  float score_cap;          // c > 0: scores are c tanh(score / c)
  float logit_cap;          // the same for logits
  float embedding_factor;   // multiplies embeddings
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
  // [layers, 2, num_blocks, block_size, kv_heads, head_dim]; kv_layout.h has the layout of a block.
  // With `kv_bits` 8 or 4, integers: [layers, 2, num_blocks] blocks of kv_codes.h. For latent
  // attention: [layers, 1, num_blocks, block_size, 1, head_dim], in exactly this order.
  void* cache;
  int64_t num_blocks;
  int32_t block_size, kv_bits;
  int32_t unseen;           // first slots of a row's context, which no token attends to
  // Adapters' additions to a layer's qkv, output, gate_up, down and q_up: [adapters, num_layers,
  // 5]; null: no adapters.
  const RlLowRank* adapters;
  int32_t adapter_rank;  // largest rank of an adapter
  // For several processes with a part of each layer each: replaces `numbers` by their sum over all
  // processes. Returns 0, else the step fails. Null: this process has all.
  int32_t (*sum)(float* numbers, int64_t count);
};

// Rows of attention. Row r owns the flat tokens row_start[r] : row_start[r + 1], the last of its
// context_len[r] tokens. Its position p is in slot block_tables[r, p / block_size] * block_size + p
// % block_size.
struct RlRows {
  int32_t rows, width;          // R; columns of block_tables
  const int32_t* row_start;     // [R + 1]
  const int32_t* context_len;   // [R]
  const int32_t* block_tables;  // [R, width]
  // Runs of rows with leading blocks in common: rows begin : end share the blocks low : high of
  // their tables. Depth first, outer before inner; no run holds the positions of a row's new
  // tokens. With num_runs < 0, C++ finds the runs.
  int32_t num_runs;
  const int32_t* runs;  // [num_runs, 4]: begin, end, low, high
};

// Parts of a step's time.
enum RlPart : int32_t { RL_PLAN = 0, RL_ELEMENTWISE, RL_LINEAR, RL_ATTENTION, RL_PARTS };

// Step: first the copies, which are independent of each other. Then, layer by layer: keys and
// values of the T new tokens and of the M - T duplicates, then attention.
struct RlStep {
  int32_t tokens, writes, wanted, copies;  // T, M, N, C
  const int32_t* token_ids;        // [T]
  const int32_t* positions;        // [T]
  const int32_t* rotations;        // [T], rows of cos and sin
  const float* query_factors;      // [T], multiply rotated queries; or null
  const int64_t* slots;            // [M], target slots of keys and values
  // [M], the token for each slot, the first T in order; null: M = T.
  const int32_t* sources;
  const int32_t* wanted_tokens;    // [N], ascending or not; null: all (N = T)
  const int32_t* copied;           // [C, 3]: source block, target block, slots from the first on
  RlRows rows;
  const int32_t* adapters;  // [T], the number of each token's adapter, -1: none; null: no token's
  // For a head that reads another model's states instead of embeddings: the residual stream [T,
  // hidden], and the input of the first layer's products [T, their inputs]; null: embeddings.
  const float* given_residual;
  const void* given_inputs;
  // Layers whose input, the residual stream of all tokens, is wanted. Output: states [T,
  // layers_wanted, hidden] of the model's dtype.
  int32_t layers_wanted;
  const int32_t* wanted_layers;
  void* states;
  float* residual;  // out [N, hidden], before the final norm; null: not wanted
  void* hidden;    // out [N, hidden], final-normed
  int64_t* nanos;  // [RL_PARTS], nanoseconds are added; null: not measured
};

// Memory that `rl_forward` keeps between steps; it grows with the largest step. One per model.
struct RlWorkspace;
RL_API RlWorkspace* rl_workspace_new();
RL_API void rl_workspace_free(RlWorkspace* workspace);

// Runs all layers. `team` (here and below) is a rootlace::Team*.
RL_API int32_t rl_forward(void* team, RlWorkspace* workspace, const RlModel* model,
                          const RlStep* step);

// Computes hidden[rows, hidden] -> logits[rows, vocab] and, unless `tokens` is null, the best token
// of each row: the largest logit, the smallest id among equals. -1 if that logit is not finite, or
// if any is NaN. With `masks` only tokens that a row's mask allows count. masks[row] is the address
// of ceil(vocab / 32) words (bit i of word w is token 32 w + i); 0 allows all tokens. Excluded
// logits may stay unwritten.
RL_API int32_t rl_logits(void* team, const RlModel* model, const void* hidden, int32_t rows,
                         const int64_t* masks, float* logits, int32_t* tokens);

// Numbers of rows, `apart` bytes from one to the next.
struct RlColumn {
  const void* first;
  int64_t apart;
};

// `LogitEdits` of kernels/interface.py, with the same names; null: no such edit.
struct RlEdits {
  const int32_t *bias_start, *bias_token;
  const float* bias;
  const int32_t* mask_table;
  int64_t mask_words;  // words in a row of the table
  const int32_t* mask_row;
  const int32_t *seen_start, *seen_token, *seen_count;
  const RlColumn* penalties;  // as listed by `rl_penalties`
};

// Lists the penalties that `rl_edit` reads, in order: "double repetition_penalty,double ..."
RL_API const char* rl_penalties();

// Edits logits[rows, vocab] -> out[rows, vocab].
RL_API int32_t rl_edit(void* team, const float* logits, int32_t rows, int32_t vocab,
                       const RlEdits* edits, float* out);

// `PickRows` of kernels/interface.py.
struct RlPicks {
  RlColumn seed, position;    // int64_t
  const int32_t* mask_table;  // rows of ceil(vocab / 32) words
  RlColumn mask_row;          // int32_t, -1: all tokens are allowed; null: -1 in all rows
  RlColumn params[];          // as listed by `rl_pick_params`
};

// Lists the parameters that `rl_pick` reads, in order: "double temperature,double ..."
RL_API const char* rl_pick_params();

// Picks a token for each of `rows` rows of `vocab` logits; -1 without a distribution.
RL_API int32_t rl_pick(void* team, const float* logits, int32_t rows, int32_t vocab,
                       const RlPicks* picks, int32_t* tokens);

// Scores `rows` rows of `vocab` logits: the log-probability of each row's token (NaN for no token),
// and ids and log-probabilities of the row's `top` best tokens (at most `vocab`), [rows, top].
RL_API int32_t rl_scores(void* team, const float* logits, int32_t rows, int32_t vocab,
                         const int32_t* tokens, int32_t top, float* logprobs, int32_t* top_ids,
                         float* top_logprobs);

// Asks the system to permit this library's instructions. Returns 0, or the reason (an errno) why no
// other function may be called.
RL_API int32_t rl_prepare();

// Names the instruction set of this library: "amx", "avx512-bf16", "avx512", "avx2", "neon-bf16",
// "neon" or "generic"; with "-twin" behind it if tests emulate the set.
RL_API const char* rl_instructions();

// Gives the sizes of RlScheme, RlSource, RlLinear, RlNorm, RlExpert, RlLayer, RlMixture, RlLatent,
// RlLowRank, RlModel, RlRows, RlStep and RlEdits, to check mirrors of these structures.
RL_API void rl_sizes(int64_t* sizes);

// Threads for all functions that take a team; see team.h.
RL_API void* rl_team_new(int32_t threads);
RL_API void rl_team_free(void* team);
RL_API int32_t rl_team_size(void* team);

// For tests: runs a region of `rounds` times `tasks` tasks of about `work` additions each. Adds the
// runs of each task to counts[rounds, tasks]. Returns how often a task saw an unfinished task of
// the round before; -1 if the region threw.
RL_API int64_t rl_team_try(void* team, int32_t rounds, int32_t tasks, int64_t work,
                           int32_t* counts);

// For tests: runs a region of three rounds. In the second round, task `at` asks for `bytes` of
// scratch memory, or throws for a negative number.
RL_API int32_t rl_team_fail(void* team, int32_t tasks, int32_t at, int64_t bytes);

}
