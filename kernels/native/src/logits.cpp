// From hidden states to logits, and to the best tokens.
#include <algorithm>

#include "activations.h"
#include "api.h"
#include "division.h"
#include "guard.h"
#include "linear.h"
#include "pick.h"
#include "team.h"
#include "vec.h"

namespace rootlace {
namespace {

constexpr int PIECE = 16384;  // logits of a task

// x = limit * tanh(x / limit).
void cap(Crew& crew, float* x, int64_t size, float limit) {
  crew.each(static_cast<int>(ceil_div(size, PIECE)), [&](int task) {
    int64_t i = static_cast<int64_t>(task) * PIECE, end = std::min<int64_t>(i + PIECE, size);
    for (; i + LANES <= end; i += LANES) store(x + i, limit * tanh<float>(load(x + i) / limit));
    for (; i < end; i++) x[i] = limit * tanh<float>(splat(x[i] / limit))[0];
  });
}

template <class T>
void project(Crew& crew, const RlModel& model, const void* hidden, int rows, const int64_t* masks,
             float* logits) {
  const T* x = static_cast<const T*>(hidden);
  if (masks)
    linear_among(crew, x, model.hidden, rows, model.head, masks, logits, model.vocab);
  else
    linear(crew, x, model.hidden, rows, model.head, Epilogue::FLOAT32, logits, model.vocab);
  if (model.logit_cap > 0) cap(crew, logits, static_cast<int64_t>(rows) * model.vocab, model.logit_cap);
}

}  // namespace
}  // namespace rootlace

extern "C" int32_t rl_logits(void* team, const RlModel* model, const void* hidden, int32_t rows,
                             const int64_t* masks, float* logits, int32_t* tokens) {
  using namespace rootlace;
  auto region = [&](Crew& crew) {
    if (model->dtype == RL_BFLOAT16)
      project<bf16>(crew, *model, hidden, rows, masks, logits);
    else
      project<float>(crew, *model, hidden, rows, masks, logits);
    if (tokens) best(crew, logits, rows, model->vocab, masks, tokens);
  };
  const size_t shared = model->dtype == RL_BFLOAT16 ? shared_bytes<bf16>(rows, model->hidden) : 0;
  return guarded([&] { static_cast<Team*>(team)->run(shared, region); });
}
