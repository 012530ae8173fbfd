// Runs of neighbouring rows with leading blocks in common.
#pragma once

#include <vector>

#include "api.h"

namespace rootlace {

constexpr int LEAST_SAVED = 256;  // least slots that a run must save to be worth its tasks

// Runs in the form of `RlRows`. Reuse allocates memory only if the present memory is too small.
class SharedRuns {
 public:
  // Finds every run that saves reading at least `least` slots. Only whole blocks count, without the
  // positions of a row's new tokens. Rows that share blocks are neighbours: the scheduler lists
  // rows in depth-first order of the prefix tree.
  void find(const RlRows& rows, int block_size, int least);

  // Returns the rows with their runs, found here unless the rows name them.
  RlRows added_to(RlRows rows, int block_size) {
    if (rows.num_runs < 0) {
      find(rows, block_size, LEAST_SAVED);
      rows.num_runs = size();
      rows.runs = data();
    }
    return rows;
  }

  int size() const { return static_cast<int>(runs_.size() / 4); }
  const int32_t* data() const { return runs_.data(); }

 private:
  struct Run {
    int begin, end, blocks;
  };

  std::vector<int32_t> runs_;
  std::vector<Run> found_, open_;
};

}  // namespace rootlace
