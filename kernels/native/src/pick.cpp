// The best tokens of rows, among those that a packed mask allows.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "api.h"
#include "elementwise.h"
#include "team.h"
#include "vec.h"

namespace rootlace {
namespace {

constexpr int WORD = 32;  // tokens per word of a mask

// For each half of a word's bits, one lane each.
inline Ints lanes_of(uint32_t bits) {
  Ints lane = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
               1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return (lane & (static_cast<int32_t>(bits) - Ints{})) != 0;
}

// As `argmax`, of the numbers whose bits are set; the others may be anything.
int32_t argmax_among(const float* x, int size, const int32_t* mask) {
  float most = -INFINITY;
  bool nan = false;
  Vec best = splat(-INFINITY);
  Ints unordered = {};
  const Vec none = splat(-INFINITY);
  int whole = size / WORD;
  for (int w = 0; w < whole; w++) {
    uint32_t bits = static_cast<uint32_t>(mask[w]);
    if (!bits) continue;
    for (int half = 0; half < 2; half++) {
      Ints allowed = lanes_of(bits >> (16 * half) & 0xffff);
      Vec v = load(x + w * WORD + half * LANES);
      v = allowed ? v : none;
      best = max_of(best, v);
      unordered |= v != v;
    }
  }
  if (whole) {
    most = max_of(best);
    for (int j = 0; j < LANES; j++) nan |= unordered[j] != 0;
  }
  auto allows = [mask](int i) { return static_cast<uint32_t>(mask[i / WORD]) >> i % WORD & 1; };
  for (int i = whole * WORD; i < size; i++) {
    if (!allows(i)) continue;
    nan |= x[i] != x[i];
    most = x[i] > most ? x[i] : most;
  }
  if (nan || std::isinf(most)) return -1;
  for (int w = 0; w * WORD < size; w++) {
    uint32_t bits = static_cast<uint32_t>(mask[w]);
    for (; bits; bits &= bits - 1) {
      int i = w * WORD + __builtin_ctz(bits);
      if (i < size && x[i] == most) return i;
    }
  }
  return -1;
}

}  // namespace
}  // namespace rootlace

extern "C" void rl_best(void* team, const float* logits, int32_t rows, int32_t vocab,
                        const int64_t* masks, int32_t* tokens) {
  using namespace rootlace;
  static_cast<Team*>(team)->run([&](Crew& crew) {
    crew.each(rows, [&](int row) {
      const float* x = logits + static_cast<int64_t>(row) * vocab;
      const auto* mask = reinterpret_cast<const int32_t*>(static_cast<intptr_t>(masks[row]));
      tokens[row] = mask ? argmax_among(x, vocab, mask) : argmax(x, vocab);
    });
  });
}
