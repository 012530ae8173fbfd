// Which neighbouring rows have leading blocks in common.
#pragma once

#include <vector>

#include "api.h"

namespace rootlace {

constexpr int LEAST_SAVED = 256;  // slots that sharing must save a run to be worth its tasks

// Runs as `RlRows` wants them. Using it again allocates only what does not fit into its memory.
class SharedRuns {
 public:
  // Finds every run that saves reading at least `least` slots. Only whole blocks count, and a row
  // keeps the positions of its new tokens to itself. Rows that share are neighbours: the scheduler
  // lists them in depth-first order of the prefix tree.
  void find(const RlRows& rows, int block_size, int least);

  // Rows with their runs: those found here where it is not said which there are.
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
