#include "pick.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "elementwise.h"
#include "mask.h"
#include "team.h"
#include "vec.h"

namespace rootlace {
namespace {

// Largest number in each lane, the first of equals, and the index of its word.
struct Most {
  Vec value = splat(-INFINITY);
  Ints word = {};
  Ints unordered = {};

  void see(Vec v, int w) {
    Ints more = v > value;
    value = more ? v : value;
    word = more ? w - Ints{} : word;
    unordered |= v != v;
  }
};

// Returns `argmax` over the numbers whose bits are set; other numbers may be anything.
int32_t argmax_among(const float* x, int size, const int32_t* mask) {
  Most halves[2];
  int whole = size / MASK_WORD;
  for (int w = 0; w < whole; w++) {
    uint32_t bits = static_cast<uint32_t>(mask[w]);
    if (!bits) continue;
    halves[0].see(Isa::only(load(x + w * MASK_WORD), bits & 0xffff), w);
    halves[1].see(Isa::only(load(x + w * MASK_WORD + LANES), bits >> 16), w);
  }
  float most = -INFINITY;
  int at = -1;
  bool nan = false;
  for (int half = 0; half < 2; half++) {
    for (int j = 0; j < LANES; j++) {
      nan |= halves[half].unordered[j] != 0;
      float value = halves[half].value[j];
      int i = halves[half].word[j] * MASK_WORD + half * LANES + j;
      if (value > most || (value == most && i < at)) {
        most = value;
        at = i;
      }
    }
  }
  for (int i = whole * MASK_WORD; i < size; i++) {
    if (!(bits_from(mask, i) & 1)) continue;
    nan |= x[i] != x[i];
    if (x[i] > most) {
      most = x[i];
      at = i;
    }
  }
  return nan || std::isinf(most) ? -1 : at;
}

}  // namespace

int32_t best(const float* logits, int vocab, int64_t mask) {
  if (!mask) return argmax(logits, vocab);
  return argmax_among(logits, vocab, mask_at(mask));
}

void best(Crew& crew, const float* logits, int rows, int vocab, const int64_t* masks,
          int32_t* tokens) {
  crew.each(rows, [&](int row) {
    const float* x = logits + static_cast<int64_t>(row) * vocab;
    tokens[row] = best(x, vocab, masks ? masks[row] : 0);
  });
}

}  // namespace rootlace
