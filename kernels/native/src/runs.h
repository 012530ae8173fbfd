// Which neighbouring rows have leading blocks in common.
#pragma once

#include <vector>

#include "api.h"

namespace rootlace {

// Runs as `RlRows` wants them. Using it again allocates only what does not fit into its memory.
class SharedRuns {
 public:
  // Finds every run that saves reading at least `least` slots. Only whole blocks count, and a row
  // keeps the positions of its new tokens to itself. Rows that share are neighbours: the scheduler
  // lists them in depth-first order of the prefix tree.
  void find(const RlRows& rows, int block_size, int least);

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
