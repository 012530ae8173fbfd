// Mixture of experts: the router chooses the MLPs of each token.
//
// Tokens of one expert are gathered and multiplied together; all experts of a step are one grouped
// product. A token's outputs are summed in the order in which its experts were chosen, so its bits
// do not depend on other tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "api.h"
#include "elementwise.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace rootlace {

template <class T>
class Mixture {
 public:
  // For steps of so many tokens.
  Mixture(const RlModel& model, int tokens)
      : shape_(model.mixture), hidden_(model.hidden), slices_(ceil_div(tokens, MOST_ROWS)) {
    rows_ = shape_.count ? std::min(tokens, MOST_ROWS) : 0;
    layers_ = shape_.count ? model.num_layers : 0;
    gathered_stride_ = spread<T>(hidden_);
    inner_stride_ = spread<T>(shape_.inner);
  }

  // Memory that this needs, and where it is; 64-byte aligned.
  size_t bytes() const {
    Mixture copy(*this);
    return copy.lay(nullptr);
  }
  void put(char* memory) { lay(memory); }

  // Rows and inputs of the mixture's largest products.
  size_t most_rows() const { return static_cast<size_t>(rows_) * std::max(shape_.chosen, 1); }
  int most_inputs() const { return std::max(hidden_, shape_.inner); }

  // Adds the output of layer `index`'s experts for x[tokens, hidden] to out[tokens, hidden];
  // without `add`, replaces out. All threads of a region call this with the same arguments.
  void run(Crew& crew, const RlLayer& layer, int index, const T* x, size_t stride, int tokens,
           float* out, bool add) const {
    for (int slice = 0, row = 0; row < tokens; slice++, row += MOST_ROWS)
      some(crew, layer, groups_ + static_cast<size_t>(index * slices_ + slice) * (shape_.count + 1),
           x + row * stride, stride, std::min(tokens - row, MOST_ROWS),
           out + static_cast<size_t>(row) * hidden_, add);
  }

  // Multiplies inner[tokens, shared] by the sigmoid of a token's product with the shared MLP's
  // gate.
  void weigh(Crew& crew, const RlLayer& layer, const T* x, size_t stride, int tokens, T* inner,
             size_t inner_stride) const {
    for (int row = 0; row < tokens; row += MOST_ROWS) {
      const int count = std::min(tokens - row, MOST_ROWS);
      linear(crew, x + row * stride, stride, count, layer.shared_gate, Epilogue::FLOAT32, scores_, 1);
      each_row(crew, count, [&](int t) {
        const float gate = 1.0f / (1.0f + std::exp(-scores_[t]));
        T* to = inner + (row + t) * inner_stride;
        for (int i = 0; i < layer.down.inputs; i++) store(to + i, to_float(to[i]) * gate);
      });
    }
  }

 private:
  static constexpr int MOST_ROWS = 1024;  // at a time, which bounds the memory

  size_t lay(char* memory) {
    const size_t rows = rows_, pairs = rows * shape_.chosen;
    size_t taken = 0;
    auto take = [&](auto*& to, size_t count) {
      to = reinterpret_cast<std::decay_t<decltype(to)>>(memory + taken);
      taken += (count * sizeof *to + 63) / 64 * 64;
    };
    take(scores_, rows * shape_.count);
    take(ranked_, rows * shape_.count);
    take(shares_, pairs);
    take(chosen_, pairs);
    take(places_, pairs);
    take(tokens_, pairs);
    take(firsts_, shape_.count + 1);
    take(gathered_, pairs * gathered_stride_);
    take(inner_, pairs * inner_stride_);
    take(groups_, static_cast<size_t>(layers_) * slices_ * (shape_.count + 1));
    return taken;
  }

  // Runs at most MOST_ROWS tokens. `groups` [count + 1] belong to this layer and these rows alone.
  // Threads go through a region's products at their own pace, so a late thread still reads the
  // groups of a product that the others have finished.
  void some(Crew& crew, const RlLayer& layer, RowGroup* groups, const T* x, size_t stride, int rows,
            float* out, bool add) const {
    linear(crew, x, stride, rows, layer.router, Epilogue::FLOAT32, scores_, shape_.count);
    each_row(crew, rows, [&](int t) { choose(layer, t); });
    crew.each(1, [&](int) { group(layer, rows, groups); });
    each_row(crew, rows * shape_.chosen, [&](int at) {
      std::memcpy(static_cast<void*>(gathered_ + at * gathered_stride_), x + tokens_[at] * stride,
                  hidden_ * sizeof(T));
    });
    linear_grouped(crew, gathered_, gathered_stride_, groups, &RlExpert::gate_up,
                   static_cast<Epilogue>(shape_.activation), inner_, inner_stride_);
    linear_grouped(crew, inner_, inner_stride_, groups, &RlExpert::down, Epilogue::STORE, gathered_,
                   gathered_stride_);
    each_row(crew, rows, [&](int t) {
      float* to = out + static_cast<size_t>(t) * hidden_;
      if (!add) std::fill_n(to, hidden_, 0.0f);
      for (int at = t * shape_.chosen; at < (t + 1) * shape_.chosen; at++)
        rootlace::add(gathered_ + places_[at] * gathered_stride_, shares_[at] * shape_.factor,
                      hidden_, to);
    });
  }

  // Chooses the experts of a token with their shares: best first, of equals the first.
  void choose(const RlLayer& layer, int t) const {
    float* scores = scores_ + static_cast<size_t>(t) * shape_.count;
    float* ranked = ranked_ + static_cast<size_t>(t) * shape_.count;
    float all = make_shares(scores), of_chosen = 0;
    for (int i = 0; i < shape_.count; i++)
      ranked[i] = layer.correction ? scores[i] / all + layer.correction[i] : scores[i];
    if (shape_.groups > 1) keep_best_groups(ranked);
    int32_t* chosen = chosen_ + t * shape_.chosen;
    float* shares = shares_ + t * shape_.chosen;
    for (int rank = 0; rank < shape_.chosen; rank++) {
      const int best = chosen[rank] = take_best(ranked, shape_.count);
      of_chosen += shares[rank] = scores[best];
    }
    for (int rank = 0; rank < shape_.chosen; rank++)
      shares[rank] /= shape_.normalised ? of_chosen : all;
  }

  // Turns a token's scores into shares; returns their divisor.
  float make_shares(float* scores) const {
    float* const end = scores + shape_.count;
    if (shape_.sigmoid) {
      std::transform(scores, end, scores, [](float x) { return 1.0f / (1.0f + std::exp(-x)); });
      return 1;
    }
    const float most = *std::max_element(scores, end);
    float all = 0;
    for (; scores != end; scores++) all += *scores = std::exp(*scores - most);
    return all;
  }

  // Returns the place of the largest number, the first of equals, and marks it as taken.
  static int take_best(float* numbers, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
      if (numbers[i] > (best < 0 ? TAKEN : numbers[best])) best = i;
    // If only NaNs are left, a NaN is taken.
    for (int i = 0; best < 0 && i < count; i++)
      if (numbers[i] != TAKEN) best = i;
    best = std::max(best, 0);
    numbers[best] = TAKEN;
    return best;
  }

  // Removes the experts whose group does not count.
  void keep_best_groups(float* ranked) const {
    const int size = shape_.count / shape_.groups;
    std::vector<float> best(shape_.groups), members(size);
    for (int group = 0; group < shape_.groups; group++) {
      std::copy_n(ranked + group * size, size, members.data());
      for (int i = 0; i < shape_.best_of_group; i++) {
        const int one = take_best(members.data(), size);
        best[group] += ranked[group * size + one];
      }
    }
    for (int i = 0; i < shape_.chosen_groups; i++) take_best(best.data(), shape_.groups);
    for (int group = 0; group < shape_.groups; group++)
      if (best[group] != TAKEN) std::fill_n(ranked + group * size, size, TAKEN);
  }

  // Sorts the pairs of a token and an expert by expert, then by token.
  void group(const RlLayer& layer, int rows, RowGroup* groups) const {
    const int pairs = rows * shape_.chosen;
    std::fill_n(firsts_, shape_.count + 1, 0);
    for (int at = 0; at < pairs; at++) firsts_[chosen_[at] + 1]++;
    for (int i = 0; i < shape_.count; i++) {
      if (firsts_[i + 1]) *groups++ = {layer.experts + i, firsts_[i], firsts_[i + 1]};
      firsts_[i + 1] += firsts_[i];
    }
    *groups = {};
    for (int at = 0; at < pairs; at++) {
      places_[at] = firsts_[chosen_[at]]++;
      tokens_[places_[at]] = at / shape_.chosen;
    }
  }

  static constexpr float TAKEN = -INFINITY;  // replaces the number of a taken expert

  RlMixture shape_;
  int hidden_, slices_, rows_, layers_;
  size_t gathered_stride_, inner_stride_;
  float* scores_;      // [rows, count]: then shares
  float* ranked_;      // [rows, count]: numbers for the choice of experts
  float* shares_;      // [rows, chosen]; the next two likewise
  int32_t* chosen_;    // experts
  int32_t* places_;    // among the gathered rows
  int32_t* tokens_;    // [rows x chosen], tokens of the gathered rows
  int32_t* firsts_;    // [count + 1]
  T* gathered_;        // [rows x chosen, hidden]: input of the experts, then their output
  T* inner_;           // [rows x chosen, inner]
  RowGroup* groups_;   // [layers, slices, count + 1]
};

}  // namespace rootlace
