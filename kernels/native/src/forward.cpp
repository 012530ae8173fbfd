#include "api.h"

extern "C" void rl_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(RlLinear), sizeof(RlLayer), sizeof(RlModel), sizeof(RlRows),
                         sizeof(RlStep)};
  for (int64_t size : all) *sizes++ = size;
}
