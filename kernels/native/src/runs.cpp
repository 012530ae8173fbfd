#include "runs.h"

#include <algorithm>

namespace rootlace {
namespace {

// Returns the number of blocks of row r that other rows may share.
int whole_blocks(const RlRows& rows, int row, int block_size) {
  int own = rows.row_start[row + 1] - rows.row_start[row];
  return (rows.context_len[row] - own) / block_size;
}

// Returns the number of leading blocks that row r and the next row have in common.
int common_blocks(const RlRows& rows, int row, int block_size) {
  int most = std::min(whole_blocks(rows, row, block_size), whole_blocks(rows, row + 1, block_size));
  const int32_t* first = rows.block_tables + static_cast<int64_t>(row) * rows.width;
  return static_cast<int>(std::mismatch(first, first + most, first + rows.width).first - first);
}

}  // namespace

void SharedRuns::find(const RlRows& rows, int block_size, int least) {
  // Maximal runs are the intervals of the longest-common-prefix array: one pass with a stack.
  found_.clear();
  open_.clear();
  for (int row = 0; row < rows.rows; row++) {
    int common = row + 1 < rows.rows ? common_blocks(rows, row, block_size) : 0;
    int begin = row;
    while (!open_.empty() && open_.back().blocks > common) {
      begin = open_.back().begin;
      found_.push_back({begin, row + 1, open_.back().blocks});
      open_.pop_back();
    }
    if (common && (open_.empty() || open_.back().blocks < common))
      open_.push_back({begin, 0, common});
  }
  std::sort(found_.begin(), found_.end(), [](const Run& a, const Run& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.blocks < b.blocks;
  });
  // The common blocks of a run that is not worth its task are left to the runs inside it.
  runs_.clear();
  open_.clear();
  for (const Run& run : found_) {
    while (!open_.empty() && run.begin >= open_.back().end) open_.pop_back();
    int low = open_.empty() ? 0 : open_.back().blocks;
    int64_t saved = int64_t{run.end - run.begin - 1} * (run.blocks - low) * block_size;
    if (saved >= least) {
      runs_.insert(runs_.end(), {run.begin, run.end, low, run.blocks});
      low = run.blocks;
    }
    open_.push_back({run.begin, run.end, low});
  }
}

}  // namespace rootlace
