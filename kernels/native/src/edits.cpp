// Edits of logits before sampling, by the rule of kernels/reference/sampling.py.
#include <cmath>
#include <cstring>

#include "api.h"
#include "columns.h"
#include "guard.h"
#include "mask.h"
#include "team.h"

#define PENALTIES(EACH)            \
  EACH(double, repetition_penalty) \
  EACH(double, frequency_penalty)  \
  EACH(double, presence_penalty)

namespace rootlace {
namespace {

struct Penalties {
  PENALTIES(RL_FIELD)
};

void mask(const int32_t* words, int64_t count, int vocab, float* x) {
  for (int start = 0; start < vocab; start += MASK_WORD) {
    uint32_t bits = start / MASK_WORD < count ? static_cast<uint32_t>(words[start / MASK_WORD]) : 0;
    if (!~bits) continue;
    for (int i = 0; i < MASK_WORD && start + i < vocab; i++)
      if (!(bits >> i & 1)) x[start + i] = -INFINITY;
  }
}

bool is_token(int32_t id, int vocab) {
  return static_cast<uint32_t>(id) < static_cast<uint32_t>(vocab);
}

void edit(const RlEdits& edits, int row, int vocab, float* x) {
  if (edits.bias_start) {
    for (int i = edits.bias_start[row]; i < edits.bias_start[row + 1]; i++) {
      if (!is_token(edits.bias_token[i], vocab)) continue;
      float& logit = x[edits.bias_token[i]];
      bool banned = edits.bias[i] == -INFINITY;  // with any logit
      logit = banned ? -INFINITY : logit + edits.bias[i];
    }
  }
  if (edits.mask_row && edits.mask_row[row] >= 0)
    mask(edits.mask_table + edits.mask_row[row] * edits.mask_words, edits.mask_words, vocab, x);
  if (!edits.seen_start) return;
  const RlColumn* columns = edits.penalties;
  const Penalties by{PENALTIES(RL_NUMBER)};
  float repetition = static_cast<float>(by.repetition_penalty);
  for (int i = edits.seen_start[row]; i < edits.seen_start[row + 1]; i++) {
    if (!is_token(edits.seen_token[i], vocab)) continue;
    float& logit = x[edits.seen_token[i]];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    int count = edits.seen_count[i];
    volatile double amount = by.frequency_penalty * count;  // rounded alone, as the rule has it
    amount = count > 0 ? amount + by.presence_penalty : 0.0;
    logit -= static_cast<float>(amount);
  }
}

}  // namespace
}  // namespace rootlace

extern "C" const char* rl_penalties() { return PENALTIES(RL_NAME); }

extern "C" int32_t rl_edit(void* team, const float* logits, int32_t rows, int32_t vocab,
                           const RlEdits* edits, float* out) {
  using namespace rootlace;
  auto region = [&](Crew& crew) {
    crew.each(rows, [&](int row) {
      int64_t start = static_cast<int64_t>(row) * vocab;
      std::memcpy(out + start, logits + start, sizeof(float) * vocab);
      edit(*edits, row, vocab, out + start);
    });
  };
  return guarded([&] { static_cast<Team*>(team)->run(region); });
}
