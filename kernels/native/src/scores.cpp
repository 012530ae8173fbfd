// Log-probabilities of tokens, and the best tokens of a row, by the rule of
// kernels/reference/sampling.py.
//
// A row is cut into pieces of a fixed length, and sums have one order. So a row's bits depend
// neither on other rows nor on the team. Sums are float64.
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "api.h"
#include "division.h"
#include "guard.h"
#include "team.h"
#include "vec.h"

namespace rootlace {
namespace {

constexpr int PIECE = 16384;  // stays in the second level of cache from pass to pass
constexpr int BLOCK = 1024;   // tokens whose weights are summed in float32
constexpr float NONE = std::numeric_limits<float>::quiet_NaN();

struct Ranked {
  int32_t key;  // in the order of logits; NaN is the largest
  int32_t id;

  Ranked(float logit, int32_t id) : id(id) {
    logit += 0.0f;  // -0 becomes 0
    std::memcpy(&key, &logit, sizeof key);
    key = logit != logit ? INT32_MAX : key ^ ((key >> 31) & INT32_MAX);
  }
};

// Best first; equals by id.
inline bool before(const Ranked& a, const Ranked& b) {
  return a.key != b.key ? a.key > b.key : a.id < b.id;
}

// Contribution of a piece to its row.
struct Piece {
  float most = -INFINITY;  // NaN if a logit is
  double sum = 0;          // of e^(x - most)
  std::vector<Ranked> best;  // unordered
};

float largest(const float* x, int size) {
  Vec most = splat(-INFINITY);
  Ints unordered = {};
  for (int i = 0; i < size; i += LANES) {
    Vec v = load_part(x, i, size);
    most = max_of(most, v);
    unordered |= v != v;
  }
  return bits_of(unordered) ? NONE : max_of(most);
}

double sum_of_weights(const float* x, int size, float most) {
  if (!std::isfinite(most)) return 0;
  double total = 0;
  for (int start = 0; start < size; start += BLOCK) {
    int end = std::min(start + BLOCK, size);
    Vec sums[2] = {};
    for (int i = start; i < end; i += 2 * LANES) {
      sums[0] += exp(load_part(x, i, end) - most);
      if (i + LANES < end) sums[1] += exp(load_part(x, i + LANES, end) - most);
    }
    total += sum(sums[0] + sums[1]);
  }
  return total;
}

// Returns the `count` best of x[size]; x[0] belongs to token `first`.
void find_best(const float* x, int size, int first, int count, std::vector<Ranked>& best) {
  best.clear();
  best.reserve(count);
  float least = -INFINITY;  // worst of a full heap, which later logits must exceed
  for (int i = 0; i < size; i += LANES) {
    int end = std::min(i + LANES, size);
    bool full = static_cast<int>(best.size()) == count;
    Vec v = load_part(x, i, size);
    uint32_t bits = full ? bits_of(~(v <= least)) : 0xffff;
    for (; bits; bits &= bits - 1) {
      int at = i + __builtin_ctz(bits);
      if (at >= end) break;
      Ranked one(x[at], first + at);
      if (static_cast<int>(best.size()) < count) {
        best.push_back(one);
        std::push_heap(best.begin(), best.end(), before);
      } else if (before(one, best.front())) {
        std::pop_heap(best.begin(), best.end(), before);
        best.back() = one;
        std::push_heap(best.begin(), best.end(), before);
      }
    }
    if (static_cast<int>(best.size()) == count) least = x[best.front().id - first];
  }
}

// Returns log sum_i e^x[i] of a row.
double log_sum(const Piece* pieces, int count) {
  float most = -INFINITY;
  for (int i = 0; i < count; i++) {
    if (pieces[i].most != pieces[i].most) return NONE;
    most = std::max(most, pieces[i].most);
  }
  if (std::isinf(most)) return most;
  double total = 0;
  for (int i = 0; i < count; i++)
    total += pieces[i].sum * std::exp(static_cast<double>(pieces[i].most) - most);
  return most + std::log(total);
}

struct Scores {
  const float* logits;
  int rows, vocab;
  const int32_t* tokens;
  int top;
  float* logprobs;
  int32_t* top_ids;
  float* top_logprobs;

  void compute(Crew& crew, std::vector<Piece>& pieces) const {
    int count = static_cast<int>(pieces.size()) / rows;
    crew.each(rows * count, [&](int at) {
      int start = at % count * PIECE, size = std::min(PIECE, vocab - start);
      const float* x = logits + static_cast<int64_t>(at / count) * vocab + start;
      Piece& piece = pieces[at];
      piece.most = largest(x, size);
      piece.sum = sum_of_weights(x, size, piece.most);
      if (top) find_best(x, size, start, std::min(top, size), piece.best);
    });
    crew.each(rows, [&](int row) { finish(row, pieces.data() + row * count, count); });
  }

  void finish(int row, Piece* pieces, int count) const {
    const float* x = logits + static_cast<int64_t>(row) * vocab;
    double all = log_sum(pieces, count);
    auto logprob = [&](int id) { return static_cast<float>(x[id] - all); };
    int token = tokens[row];
    logprobs[row] = token >= 0 && token < vocab ? logprob(token) : NONE;
    if (!top) return;
    std::vector<Ranked>& best = pieces[0].best;
    for (int i = 1; i < count; i++)
      best.insert(best.end(), pieces[i].best.begin(), pieces[i].best.end());
    std::partial_sort(best.begin(), best.begin() + top, best.end(), before);
    for (int i = 0; i < top; i++) {
      int64_t at = static_cast<int64_t>(row) * top + i;
      top_ids[at] = best[i].id;
      top_logprobs[at] = logprob(best[i].id);
    }
  }
};

}  // namespace
}  // namespace rootlace

extern "C" int32_t rl_scores(void* team, const float* logits, int32_t rows, int32_t vocab,
                             const int32_t* tokens, int32_t top, float* logprobs,
                             int32_t* top_ids, float* top_logprobs) {
  using namespace rootlace;
  return guarded([&] {
    if (!rows) return;
    std::vector<Piece> pieces(static_cast<size_t>(rows) * ceil_div(vocab, PIECE));
    Scores scores{logits, rows, vocab, tokens, top, logprobs, top_ids, top_logprobs};
    static_cast<Team*>(team)->run([&](Crew& crew) { scores.compute(crew, pieces); });
  });
}
