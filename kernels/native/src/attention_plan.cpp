#include "attention_plan.h"

#include <algorithm>

#include "division.h"

namespace rootlace {
namespace {

// Cost of a key block besides its queries, in queries, since its layout is changed first.
constexpr float BLOCK_COST = 3;
// Cost of a query's state, written by one task and read by another, in queries.
constexpr float STATE_COST = 0.3f;
// Least key blocks that a run must save its rows: its task would cost more than fewer blocks.
constexpr int LEAST_SAVED = 8;
// Most queries per key head of rows in runs: with more, a row alone uses a key block well.
constexpr int MOST_SHARING = 32;
// Least queries of a task as long as its keys can be cut instead.
constexpr int FEW_QUERIES = 48;

int cut(int begin, int end, int part, int parts) {
  return begin + rootlace::cut(end - begin, part, parts);
}

}  // namespace

void AttentionPlan::make(const AttentionShape& new_shape, const RlRows& new_rows, int threads) {
  shape = new_shape;
  rows = new_rows;
  threads_ = threads;
  // Largest exponent, sums of 16 lanes, the weighted values.
  record_size = 2 * 16 + ceil_div(shape.value_dim, 16) * 16;
  tokens.clear();
  jobs_.clear();
  covered_.assign(rows.rows, 0);
  phase_.assign(rows.rows, 0);
  for (int i = 0; i < rows.num_runs; i++) share(rows.runs + 4 * i);
  for (int row = 0; row < rows.rows; row++) finish(row);
  divide();
  order();
  place_states();
}

// Makes a job of the leading key blocks of a run's rows, without the blocks of enclosing runs.
void AttentionPlan::share(const int32_t* run) {
  const int end = run[1];
  int first_row = -1, count = 0;
  auto takes_part = [&](int row) {
    int queries = new_tokens(row) * group();
    return queries > 0 && queries <= MOST_SHARING;
  };
  for (int row = run[0]; row < end; row++) {
    if (!takes_part(row)) continue;
    if (first_row < 0) first_row = row;
    count += covered_[row] == covered_[first_row];
  }
  if (first_row < 0) return;
  const int low = covered_[first_row];
  const int high = (int)((int64_t)run[3] * shape.block_size / KEY_BLOCK);
  if (high <= low || (count - 1) * (high - low) < LEAST_SAVED) return;
  AttentionTask task{(int)tokens.size(), 0, first_row, 0, shape.kv_heads, low, high, false, 0};
  int phase = 0;
  for (int row = first_row; row < end; row++) {
    if (!takes_part(row) || covered_[row] != low) continue;
    add_tokens(row);
    covered_[row] = high;
    phase = std::max(phase, phase_[row]);
  }
  task.last = (int)tokens.size();
  jobs_.push_back({task, low % SEGMENT_BLOCKS ? phase : 0});
  for (int row = first_row; row < end; row++)
    if (takes_part(row) && covered_[row] == high) phase_[row] = phase + 1;
}

// Makes jobs of a row's keys that no run computes.
void AttentionPlan::finish(int row) {
  if (new_tokens(row) <= 0) return;
  int first = (int)tokens.size();
  add_tokens(row);
  int last = (int)tokens.size();
  int count = last - first, most = std::max(MOST_QUERIES / group(), 1);
  int tiles = ceil_div(count, most);
  for (int i = 0; i < tiles; i++) {
    AttentionTask task{cut(first, last, i, tiles), cut(first, last, i + 1, tiles), row, 0,
                       shape.kv_heads, covered_[row], 0, true, 0};
    task.high = tokens[task.last - 1].position / KEY_BLOCK + 1;
    jobs_.push_back({task, phase_[row]});
  }
}

void AttentionPlan::add_tokens(int row) {
  int count = new_tokens(row);
  for (int i = 0; i < count; i++)
    tokens.push_back({rows.row_start[row] + i, rows.context_len[row] - count + i});
}

float AttentionPlan::cost(const AttentionTask& task) const {
  int queries = (task.last - task.first) * group();
  float states = task.finish && task.low == 0 ? 0 : STATE_COST * queries;
  return (task.kv_end - task.kv_begin) *
         ((task.high - task.low) * (BLOCK_COST + queries) + states + 1);
}

// Cuts jobs into small tasks, so that all threads have work to the end, and the tasks' states stay
// in the cache.
void AttentionPlan::divide() {
  float total = 0;
  for (const Job& job : jobs_) total += cost(job.task);
  const float most = threads_ > 1 ? total / (2 * threads_) : total;
  jobs_.swap(undivided_);
  jobs_.clear();
  for (const Job& job : undivided_) divide(job, most);
}

void AttentionPlan::divide(const Job& job, float most) {
  const AttentionTask& task = job.task;
  int queries = (task.last - task.first) * group();
  auto pieces_for = [&](float all) { return std::max((int)(all / most + 0.99f), 1); };
  float all = cost(task);
  int by_heads = std::max(pieces_for(all), ceil_div(queries * shape.kv_heads, MOST_QUERIES));
  by_heads = std::min(by_heads, shape.kv_heads);
  all /= by_heads;
  int by_tokens = std::min(pieces_for(all), std::max(queries / FEW_QUERIES, 1));
  by_tokens = std::max(by_tokens, ceil_div(queries, MOST_QUERIES));
  by_tokens = std::min(by_tokens, task.last - task.first);
  all /= by_tokens;
  int first_segment = task.low / SEGMENT_BLOCKS;
  int segments = ceil_div(task.high, SEGMENT_BLOCKS) - first_segment;
  int by_keys = std::max(std::min(pieces_for(all), segments), 1);

  AttentionTask piece = task;
  for (int h = 0; h < by_heads; h++) {
    piece.kv_begin = cut(0, shape.kv_heads, h, by_heads);
    piece.kv_end = cut(0, shape.kv_heads, h + 1, by_heads);
    for (int t = 0; t < by_tokens; t++) {
      piece.first = cut(task.first, task.last, t, by_tokens);
      piece.last = cut(task.first, task.last, t + 1, by_tokens);
      if (by_keys == 1) {
        add(piece, job.phase);
        continue;
      }
      AttentionTask part = piece;
      part.finish = false;
      for (int k = 0; k < by_keys; k++) {
        auto border = [&](int i) {
          return (first_segment + cut(0, segments, i, by_keys)) * SEGMENT_BLOCKS;
        };
        part.low = k ? border(k) : task.low;
        part.high = k + 1 < by_keys ? border(k + 1) : task.high;
        add(part, part.low % SEGMENT_BLOCKS ? job.phase : 0);
      }
      if (!task.finish) continue;
      part = piece;
      part.low = part.high;
      add(part, job.phase + 1);
    }
  }
}

void AttentionPlan::add(AttentionTask task, int phase) {
  task.cost = cost(task);
  jobs_.push_back({task, phase});
}

void AttentionPlan::order() {
  std::sort(jobs_.begin(), jobs_.end(), [](const Job& a, const Job& b) {
    if (a.phase != b.phase) return a.phase < b.phase;
    if (a.task.cost != b.task.cost) return a.task.cost > b.task.cost;
    return a.task.first < b.task.first;
  });
  tasks.clear();
  phase_end.clear();
  for (size_t i = 0; i < jobs_.size(); i++) {
    tasks.push_back(jobs_[i].task);
    if (i + 1 == jobs_.size() || jobs_[i + 1].phase != jobs_[i].phase)
      phase_end.push_back((int)i + 1);
  }
}

void AttentionPlan::place_states() {
  int count = rows.rows ? rows.row_start[rows.rows] : 0;
  segments.assign(count, 0);
  first_record.assign(count, 0);
  for (const AttentionTask& task : tasks) {
    if (task.finish) continue;
    int reached = ceil_div(task.high, SEGMENT_BLOCKS);
    for (int i = task.first; i < task.last; i++) {
      int& most = segments[tokens[i].token];
      most = std::max(most, reached);
    }
  }
  int used = 0;
  for (int token = 0; token < count; token++) {
    first_record[token] = used;
    used += segments[token] * shape.heads;
  }
  if (records.size() < (size_t)used * record_size) records.resize((size_t)used * record_size);
}

}  // namespace rootlace
