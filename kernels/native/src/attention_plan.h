// Division of a step's attention into tasks, made once per step, the same for all layers.
#pragma once

#include <cstddef>
#include <vector>

#include "api.h"

namespace rootlace {

constexpr int KEY_BLOCK = 64;              // keys scored at a time
constexpr int SEGMENT = 1024;              // keys after which softmax starts anew
constexpr int SEGMENT_BLOCKS = SEGMENT / KEY_BLOCK;
constexpr int MOST_QUERIES = 192;          // (token, head) pairs of a task, of all its key heads

// `value_dim`: used numbers of a value, at most head_dim. `plain`: see KvLayout.
struct AttentionShape {
  int heads, kv_heads, head_dim, block_size, value_dim;
  bool plain = false;
};

// Attention of some tokens over some key blocks, for some key heads.
struct AttentionTask {
  int first, last;       // range of AttentionPlan::tokens
  int row;               // row whose block table has the keys
  int kv_begin, kv_end;  // key heads
  int low, high;         // key blocks
  bool finish;           // true at the tokens' last keys: write the output; else keep the state
  float cost;
};

// Plan, reusable: making it again allocates memory only if the present memory is too small.
class AttentionPlan {
 public:
  // Makes the plan for `threads` threads. `rows` is copied; its arrays must outlive the plan's use.
  void make(const AttentionShape& shape, const RlRows& rows, int threads);

  struct Token {
    int token, position;
  };

  AttentionShape shape;
  RlRows rows;
  std::vector<Token> tokens;
  std::vector<AttentionTask> tasks;  // phase by phase, the largest of a phase first
  std::vector<int> phase_end;        // a phase needs the results of earlier phases

  // States passed between tasks. Token t, head h and segment s have record first_record[t] + h *
  // segments[t] + s, of `record_size` floats.
  std::vector<int> first_record, segments;
  std::vector<float> records;
  int record_size;
  float* record(int token, int head, int segment) {
    size_t index = (size_t)first_record[token] + (size_t)head * segments[token] + segment;
    return records.data() + index * record_size;
  }

 private:
  struct Job {
    AttentionTask task;
    int phase;
  };

  void share(const int32_t* run);
  void finish(int row);
  void divide();
  void divide(const Job& job, float most);
  void order();
  void place_states();
  void add(AttentionTask task, int phase);
  void add_tokens(int row);
  float cost(const AttentionTask& task) const;
  int new_tokens(int row) const { return rows.row_start[row + 1] - rows.row_start[row]; }
  int group() const { return shape.heads / shape.kv_heads; }

  int threads_;
  std::vector<Job> jobs_, undivided_;
  std::vector<int> covered_;  // per row, leading key blocks that runs compute
  std::vector<int> phase_;    // per row, the first phase that has all states of its runs
};

}  // namespace rootlace
