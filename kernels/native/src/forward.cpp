// The forward pass of a step: T flat tokens in, hidden states of the wanted tokens out.
//
// Transformer layers are those of torch_decoder.py. The structures of api.h describe a model's
// further parts, and a head that reads another model's states. The residual stream is float32;
// inputs of products are T. All layers run in one region of the team.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "adapters.h"
#include "api.h"
#include "attention.h"
#include "buffer.h"
#include "clock.h"
#include "division.h"
#include "elementwise.h"
#include "guard.h"
#include "kv_codes.h"
#include "kv_layout.h"
#include "latent.h"
#include "linear.h"
#include "mixture.h"
#include "rows.h"
#include "runs.h"
#include "team.h"

// Memory kept between steps; one per model.
struct RlWorkspace {
  rootlace::Buffer memory;
  rootlace::SharedRuns runs, last_runs;
  rootlace::AttentionPlan plan, last_plan;
  std::vector<int32_t> row_start, context_len, block_tables;  // for wanted tokens as rows
  rootlace::AdapterGroups adapted, wanted_adapted;
};

namespace rootlace {
namespace {

template <class T>
class Forward {
 public:
  Forward(RlWorkspace& space, const RlModel& model, const RlStep& step)
      : space_(space),
        model_(model),
        step_(step),
        mixture_(model, most_rows()),
        latent_(model, step.tokens) {
    q_size_ = model.heads * model.head_dim;
    kv_size_ = model.kv_heads * model.head_dim;
    qkv_size_ = latent_ ? latent_.width() : q_size_ + 2 * kv_size_;
    attended_size_ = model.heads * shape().value_dim;
    size_t tokens = step.tokens, most = most_rows(), hidden = model.hidden;
    narrow_stride_ = spread<T>(std::max({model.hidden, attended_size_, given_inputs()}));
    wide_stride_ = spread<T>(std::max({qkv_size_, model.inner, latent_ ? latent_.most_inputs() : 0}));
    wanted_stride_ = std::max(narrow_stride_, latent_ ? latent_.query_stride() : 0);
    size_t wanted = step.wanted_tokens ? step.wanted : 0;
    ordered_stride_ = has_orders() ? std::max(narrow_stride_, wide_stride_) : 0;
    size_t besides = model.parallel ? most : 0, apart = has_branches() ? most : 0;
    size_t sizes[] = {tokens * hidden * sizeof(float),      most * narrow_stride_ * sizeof(T),
                      most * wide_stride_ * sizeof(T),      wanted * hidden * sizeof(float),
                      wanted * wanted_stride_ * sizeof(T),  most * ordered_stride_ * sizeof(T),
                      besides * narrow_stride_ * sizeof(T), apart * hidden * sizeof(float),
                      mixture_.bytes(),                     latent_.bytes(),
                      adapter_bytes()};
    size_t total = 0;
    for (size_t& size : sizes) total += size = (size + 63) / 64 * 64;
    char* memory = space.memory.take(total);
    residual_ = reinterpret_cast<float*>(memory);
    narrow_ = reinterpret_cast<T*>(memory += sizes[0]);
    wide_ = reinterpret_cast<T*>(memory += sizes[1]);
    wanted_residual_ = reinterpret_cast<float*>(memory += sizes[2]);
    wanted_q_ = reinterpret_cast<T*>(memory += sizes[3]);
    ordered_ = reinterpret_cast<T*>(memory += sizes[4]);
    beside_ = reinterpret_cast<T*>(memory += sizes[5]);
    branch_ = reinterpret_cast<float*>(memory += sizes[6]);
    mixture_.put(memory += sizes[7]);
    latent_.put(memory += sizes[8]);
    lines_.put(memory + sizes[9]);
  }

  void run(Team& team) {
    Clock clock(step_.nanos);
    if (step_.tokens) plan(team.size());
    clock.mark(RL_PLAN);
    team.run(shared(), [&](Crew& crew) {
      Clock mine(crew.rank() == 0 ? step_.nanos : nullptr);
      copy(crew);
      mine.mark(RL_ELEMENTWISE);
      if (step_.tokens) layers(crew, mine);
    });
  }

 private:
  AttentionShape shape() const {
    const int value_dim = latent_ ? model_.latent.rank : model_.head_dim;
    return {model_.heads,      model_.kv_heads, model_.head_dim,
            model_.block_size, value_dim,       static_cast<bool>(latent_)};
  }

  KvLayout<T> layout() const {
    return {model_.kv_heads, model_.head_dim, model_.block_size, static_cast<bool>(latent_)};
  }

  // Memory that the threads share for their products.
  size_t shared() const {
    const int inputs = std::max({model_.hidden, latent_ ? latent_.most_inputs() : q_size_,
                                 model_.inner, model_.adapter_rank, given_inputs()});
    return std::max(shared_bytes<T>(most_rows(), inputs),
                    shared_bytes<T>(mixture_.most_rows(), mixture_.most_inputs()));
  }

  // Returns whether the last layer attends for the wanted tokens alone.
  bool few_wanted() const { return step_.wanted_tokens && 4 * step_.wanted <= step_.tokens; }

  void plan(int threads) {
    space_.plan.make(shape(), space_.runs.added_to(step_.rows, model_.block_size), threads);
    if (!few_wanted() || !step_.wanted) return;
    // Every wanted token is a row with one new token.
    const RlRows& rows = step_.rows;
    int count = step_.wanted;
    space_.row_start.resize(count + 1);
    space_.context_len.resize(count);
    space_.block_tables.resize(static_cast<size_t>(count) * rows.width);
    for (int i = 0; i < count; i++) {
      int token = step_.wanted_tokens[i];
      const int32_t* end = rows.row_start + rows.rows + 1;
      int row = static_cast<int>(std::upper_bound(rows.row_start, end, token) - rows.row_start) - 1;
      space_.row_start[i + 1] = i + 1;
      space_.context_len[i] = rows.context_len[row] - (rows.row_start[row + 1] - 1 - token);
      const int32_t* table = rows.block_tables + static_cast<int64_t>(row) * rows.width;
      std::copy(table, table + rows.width,
                space_.block_tables.begin() + static_cast<int64_t>(i) * rows.width);
    }
    RlRows last{};
    last.rows = count;
    last.width = rows.width;
    last.row_start = space_.row_start.data();
    last.context_len = space_.context_len.data();
    last.block_tables = space_.block_tables.data();
    last.num_runs = -1;
    space_.last_plan.make(shape(), space_.last_runs.added_to(last, model_.block_size), threads);
  }

  KvCodes codes() const {
    return {model_.kv_heads, model_.head_dim, model_.block_size, model_.kv_bits};
  }

  // Bytes.
  int64_t block() const {
    return model_.kv_bits ? codes().block() : layout().block() * static_cast<int64_t>(sizeof(T));
  }

  // Returns the number of vectors that a key head keeps of a token.
  int cached() const { return latent_ ? 1 : 2; }
  uint8_t* keys(int layer) const {
    return static_cast<uint8_t*>(model_.cache) + cached() * layer * model_.num_blocks * block();
  }
  uint8_t* values(int layer) const {
    return latent_ ? keys(layer) : keys(layer) + model_.num_blocks * block();
  }

  void copy(Crew& crew) const {
    if (!step_.copies) return;
    crew.each(cached() * model_.num_layers * step_.copies, [&](int task) {
      const int32_t* copied = step_.copied + 3 * (task % step_.copies);
      const int part = task / step_.copies, layer = part / cached();
      const bool keys = part % cached() == 0;
      uint8_t* cache = keys ? this->keys(layer) : values(layer);
      uint8_t *from = cache + copied[0] * block(), *to = cache + copied[1] * block();
      if (model_.kv_bits)
        codes().copy(from, to, copied[2], keys);
      else
        layout().copy(reinterpret_cast<T*>(from), reinterpret_cast<T*>(to), copied[2], keys);
    });
  }

  void layers(Crew& crew, Clock& clock) const {
    const int hidden = model_.hidden, last = model_.num_layers - 1;
    float* residual = residual_;
    int tokens = step_.tokens;
    each_row(crew, tokens, [&](int t) {
      if (step_.given_residual) return take_given(t, residual + static_cast<size_t>(t) * hidden);
      embed(t, residual + static_cast<size_t>(t) * hidden);
      norm(t, residual, model_.layers[0].input_norm, narrow_, narrow_stride_);
    });
    clock.mark(RL_ELEMENTWISE);
    const AdapterGroups* groups = &space_.adapted;
    for (int index = 0; index <= last; index++) {
      const RlLayer& layer = model_.layers[index];
      put_states(crew, index);
      auto added = [&](AdaptedPart part, const T* x, size_t stride) {
        return adapted(crew, *groups, index, part, x, stride);
      };
      const Added<T> more = added(AdaptedPart::QKV, narrow_, narrow_stride_);
      for (int part = 0, column = 0; part < layer.qkv_parts; column += layer.qkv[part++].outputs)
        multiply(crew, narrow_, narrow_stride_, tokens, layer.qkv[part], Epilogue::STORE,
                 wide_ + column, wide_stride_, more.to(part));
      clock.mark(RL_LINEAR);
      if (latent_)
        write_latents(crew, layer, index);
      else
        write(crew, layer, index);
      clock.mark(RL_ELEMENTWISE);
      const T* attended = narrow_;
      size_t attended_stride = narrow_stride_;
      if (index == last && step_.wanted_tokens) {
        // After its keys and values, the last layer is needed for wanted tokens only.
        if (!step_.wanted) return;
        attended = attend_to_wanted(crew, layer, index, clock);
        if (attended == wanted_q_) attended_stride = wanted_stride_;
        residual = wanted_residual_;
        tokens = step_.wanted;
        groups = &space_.wanted_adapted;
      } else {
        attend(crew, space_.plan, layer, index, queries(), query_stride());
        clock.mark(RL_ATTENTION);
      }
      if (latent_) {
        latent_.outputs(crew, layer, attended, attended_stride, tokens, wide_, wide_stride_);
        attended = wide_, attended_stride = wide_stride_;
      }
      // An MLP beside attention reads the residual stream before attention is added.
      T* x = model_.parallel ? beside_ : narrow_;
      if (model_.parallel) {
        each_row(crew, tokens,
                 [&](int t) { norm(t, residual, layer.post_norm, x, narrow_stride_); });
        clock.mark(RL_ELEMENTWISE);
      }
      add(crew, attended, attended_stride, tokens, layer.output, layer.attention_out_norm, residual,
          added(AdaptedPart::OUTPUT, attended, attended_stride));
      clock.mark(RL_LINEAR);
      if (!model_.parallel) {
        sum(crew, tokens);
        each_row(crew, tokens, [&](int t) {
          join(t, layer.attention_out_norm, residual, layer.post_norm, x, narrow_stride_);
        });
        clock.mark(RL_ELEMENTWISE);
      }
      mlp(crew, layer, index, x, tokens, residual, *groups);
      sum(crew, tokens);
      clock.mark(RL_LINEAR);
      const RlNorm& next = index == last ? model_.final_norm : model_.layers[index + 1].input_norm;
      T* out = index == last ? static_cast<T*>(step_.hidden) : narrow_;
      const size_t stride = index == last ? hidden : narrow_stride_;
      each_row(crew, tokens,
               [&](int t) { join(t, layer.mlp_out_norm, residual, next, out, stride); });
      clock.mark(RL_ELEMENTWISE);
    }
    if (step_.residual)
      crew.each(1, [&](int) {
        std::copy_n(residual, static_cast<size_t>(tokens) * hidden, step_.residual);
      });
  }

  // Copies the given inputs of the first layer's products.
  int given_inputs() const { return step_.given_inputs ? model_.layers[0].qkv[0].inputs : 0; }

  void take_given(int t, float* residual) const {
    const size_t hidden = model_.hidden, inputs = given_inputs();
    std::copy_n(step_.given_residual + t * hidden, hidden, residual);
    std::copy_n(static_cast<const T*>(step_.given_inputs) + t * inputs, inputs,
                narrow_ + t * narrow_stride_);
  }

  // Copies the residual stream before a layer, if wanted.
  void put_states(Crew& crew, int index) const {
    const size_t hidden = model_.hidden, count = step_.layers_wanted;
    for (size_t i = 0; i < count; i++)
      if (step_.wanted_layers[i] == index)
        each_row(crew, step_.tokens, [&](int t) {
          convert(residual_ + t * hidden, model_.hidden,
                  static_cast<T*>(step_.states) + (t * count + i) * hidden);
        });
  }

  // Computes the shared MLP and the experts, if the layer has them.
  void mlp(Crew& crew, const RlLayer& layer, int index, const T* x, int tokens, float* residual,
           const AdapterGroups& groups) const {
    const bool apart = this->apart(layer.mlp_out_norm), whole = layer.gate_up.packed;
    // The sum includes attention's part beside the MLP.
    const bool more = model_.sum && model_.parallel;
    if (whole) {
      multiply(crew, x, narrow_stride_, tokens, layer.gate_up,
               static_cast<Epilogue>(model_.activation), wide_, wide_stride_,
               adapted(crew, groups, index, AdaptedPart::GATE_UP, x, narrow_stride_));
      if (layer.shared_gate.packed)
        mixture_.weigh(crew, layer, x, narrow_stride_, tokens, wide_, wide_stride_);
      add(crew, wide_, wide_stride_, tokens, layer.down, layer.mlp_out_norm, residual,
          adapted(crew, groups, index, AdaptedPart::DOWN, wide_, wide_stride_), more);
    }
    if (layer.experts)
      mixture_.run(crew, layer, index, x, narrow_stride_, tokens, apart ? branch_ : residual,
                   whole || !apart || more);
  }

  void embed(int t, float* residual) const {
    const int hidden = model_.hidden;
    const auto* table = static_cast<const T*>(model_.embedding);
    const T* row = table + static_cast<int64_t>(step_.token_ids[t]) * hidden;
    if (model_.embedding_factor == 1) {
      convert(row, hidden, residual);
    } else {
      std::fill_n(residual, hidden, 0.0f);
      rootlace::add(row, model_.embedding_factor, hidden, residual);
    }
    if (!model_.positions) return;
    const auto* positions = static_cast<const T*>(model_.positions);
    rootlace::add(positions + static_cast<int64_t>(step_.positions[t]) * hidden, 1, hidden, residual);
  }

  // Returns the most rows of a product. Rows of the last layer are the wanted tokens, and a token
  // may be wanted several times.
  int most_rows() const {
    return std::max(step_.tokens, step_.wanted_tokens ? step_.wanted : 0);
  }

  bool has_branches() const {
    return step_.tokens && (apart(model_.layers[0].attention_out_norm) ||
                            apart(model_.layers[0].mlp_out_norm));
  }

  // Returns whether the output of a branch with this norm is not added to the residual stream at
  // once: it is normed first, or summed over processes.
  bool apart(const RlNorm& own) const { return own.weight || model_.sum; }

  // Sums a branch's output for the first tokens over all processes.
  void sum(Crew& crew, int tokens) const {
    if (!model_.sum) return;
    crew.each(1, [&](int) {
      if (model_.sum(branch_, static_cast<int64_t>(tokens) * model_.hidden))
        throw std::runtime_error("the sum over processes failed");
    });
  }

  // A step that only copies reads no weights, which may be absent.
  bool has_orders() const {
    const int layers = step_.tokens ? model_.num_layers : 0;
    return std::any_of(model_.layers, model_.layers + layers, [](const RlLayer& layer) {
      return layer.qkv[0].order || layer.qkv[1].order || layer.qkv[2].order ||
             layer.q_up.order || layer.output.order || layer.gate_up.order || layer.down.order;
    });
  }

  void multiply(Crew& crew, const T* x, size_t stride, int rows, const RlLinear& weights,
                Epilogue epilogue, void* out, size_t out_stride, const Added<T>& added) const {
    if (weights.order) {
      put_in_order(crew, x, stride, rows, weights, ordered_, ordered_stride_);
      x = ordered_, stride = ordered_stride_;
    }
    linear(crew, x, stride, rows, weights, epilogue, out, out_stride, added);
  }

  // Adds the product to the residual stream. If the branch is kept apart, `join` adds it: then the
  // product is the branch's output, or, with `more`, added to it.
  void add(Crew& crew, const T* x, size_t stride, int rows, const RlLinear& weights,
           const RlNorm& own, float* residual, const Added<T>& added, bool more = false) const {
    const bool apart = this->apart(own);
    multiply(crew, x, stride, rows, weights, apart && !more ? Epilogue::FLOAT32 : Epilogue::ADD,
             apart ? branch_ : residual, model_.hidden, added);
  }

  // Finds this step's groups of adapters; returns the memory that they need.
  size_t adapter_bytes() {
    const int32_t* adapters = step_.tokens ? step_.adapters : nullptr;
    space_.adapted.find(adapters, nullptr, step_.tokens);
    if (step_.wanted_tokens)
      space_.wanted_adapted.find(adapters, step_.wanted_tokens, step_.wanted);
    if (!adapters) return 0;
    // A token may be wanted several times.
    lines_.rows = std::max(space_.adapted.rows.size(), space_.wanted_adapted.rows.size());
    lines_.gathered_stride = std::max(narrow_stride_, wide_stride_);
    lines_.inner_stride = spread<T>(model_.adapter_rank);
    return lines_.bytes();
  }

  // Returns adapters' additions to a product of x, a part of a layer.
  Added<T> adapted(Crew& crew, const AdapterGroups& groups, int index, AdaptedPart part, const T* x,
                size_t stride) const {
    if (groups.groups.empty()) return {};
    const size_t count = static_cast<size_t>(AdaptedPart::COUNT), apart = model_.num_layers * count;
    const RlLowRank* parts = model_.adapters + index * count + static_cast<size_t>(part);
    return adapt(crew, x, stride, groups, parts, apart, lines_);
  }

  // Adds a branch's output, after its `own` norm if it has one; then computes the next norm.
  void join(int row, const RlNorm& own, float* residual, const RlNorm& following, T* out,
            size_t stride) const {
    if (apart(own)) {
      float* branch = branch_ + static_cast<size_t>(row) * model_.hidden;
      if (own.weight) norm(branch, own, branch);
      rootlace::add(branch, 1, model_.hidden, residual + static_cast<size_t>(row) * model_.hidden);
    }
    norm(row, residual, following, out, stride);
  }

  void norm(int row, const float* residual, const RlNorm& weights, T* out, size_t stride) const {
    norm(residual + static_cast<size_t>(row) * model_.hidden, weights, out + row * stride);
  }

  template <class Out>
  [[gnu::noinline]] void norm(const float* x, const RlNorm& norm, Out* out) const {
    if (!norm.weight)
      convert(x, model_.hidden, out);
    else if (model_.layer_norms)
      layer_norm(x, norm.weight, norm.bias, model_.hidden, model_.eps, out);
    else
      rms_norm(x, norm.weight, model_.hidden, model_.eps, out);
  }

  // Returns the queries of all tokens, once rotated.
  const T* queries() const { return latent_ ? latent_.queries() : wide_; }
  size_t query_stride() const { return latent_ ? latent_.query_stride() : wide_stride_; }

  // Finds a token's cosines or sines in a layer; null without rotation.
  void find_rotation(const RlLayer& layer, int token, const float*& cos, const float*& sin) const {
    if (layer.rotation < 0) return;
    const int64_t at = step_.rotations[token] * model_.rotation_stride + layer.rotation;
    cos = model_.cos + at, sin = model_.sin + at;
  }

  // Writes the tokens' latents to the cache, and makes their queries.
  void write_latents(Crew& crew, const RlLayer& layer, int index) const {
    each_row(crew, step_.writes, [&](int i) {
      const int token = step_.sources ? step_.sources[i] : i;
      const float *cos = nullptr, *sin = nullptr;
      find_rotation(layer, token, cos, sin);
      T* row = wide_ + token * wide_stride_;
      alignas(64) T key[MAX_CACHED];
      latent_.make_key(layer, row, cos, sin, key);
      layout().put_key(reinterpret_cast<T*>(keys(index)), step_.slots[i], 0, key);
      if (i < step_.tokens) latent_.norm(layer, row);
    });
    latent_.make_queries(
        crew, layer, wide_, wide_stride_, step_.tokens,
        [&](const T* x, size_t stride, const RlLinear& weights, T* to, size_t to_stride) {
          multiply(crew, x, stride, step_.tokens, weights, Epilogue::STORE, to, to_stride,
                   adapted(crew, space_.adapted, index, AdaptedPart::Q_UP, x, stride));
        },
        [&](int token, const float*& cos, const float*& sin) {
          find_rotation(layer, token, cos, sin);
        });
  }

  // Rotates the queries in place; writes keys and values to the cache.
  void write(Crew& crew, const RlLayer& layer, int index) const {
    const int dim = model_.head_dim;
    each_row(crew, step_.writes, [&](int i) {
      int token = step_.sources ? step_.sources[i] : i;
      T* qkv = wide_ + token * wide_stride_;
      const float *cos = nullptr, *sin = nullptr;
      find_rotation(layer, token, cos, sin);
      if (i < step_.tokens) {
        each_head(qkv, model_.heads, layer.q_norm,
                  [&](int head, const T* x, const float* norm, float scale) {
                    norm_and_rotate(x, norm, scale, cos, sin, dim, qkv + head * dim);
                    if (model_.kv_bits) mix(qkv + head * dim, dim);
                  });
        if (step_.query_factors) multiply_by(step_.query_factors[token], q_size_, qkv);
      }
      T *k = qkv + q_size_, *v = k + kv_size_;
      each_head(k, model_.kv_heads, layer.k_norm,
                [&](int head, const T* x, const float* norm, float scale) {
                  alignas(64) T key[MAX_HEAD_DIM];
                  norm_and_rotate(x, norm, scale, cos, sin, dim, key);
                  if (model_.kv_bits) mix(key, dim);
                  put(index, step_.slots[i], head, key, v + head * dim);
                });
    });
  }

  // Writes a head's key and value to their slot.
  void put(int index, int64_t slot, int head, const T* key, const T* value) const {
    uint8_t *k_cache = keys(index), *v_cache = values(index);
    if (model_.kv_bits) {
      Rounded rounded;
      round_to_codes(key, model_.head_dim, model_.kv_bits, rounded);
      codes().put_key(k_cache, slot, head, rounded);
      round_to_codes(value, model_.head_dim, model_.kv_bits, rounded);
      codes().put_value(v_cache, slot, head, rounded);
    } else {
      layout().put_key(reinterpret_cast<T*>(k_cache), slot, head, key);
      layout().put_value(reinterpret_cast<T*>(v_cache), slot, head, value);
    }
  }

  // Calls visit(number, numbers, norm, scale) for each head. `norm` and `scale` are factors of an
  // RMSNorm of heads; with LayerNorm the numbers are normed already.
  template <class Visit>
  void each_head(const T* x, int heads, const float* norm, Visit&& visit) const {
    const int dim = model_.head_dim;
    if (norm && model_.own_norms) {
      for (int head = 0; head < heads; head++, x += dim, norm += dim) {
        alignas(64) float numbers[MAX_HEAD_DIM];
        alignas(64) T normed[MAX_HEAD_DIM];
        convert(x, dim, numbers);
        layer_norm(numbers, norm, nullptr, dim, model_.eps, normed);
        visit(head, normed, nullptr, 1);
      }
      return;
    }
    const bool joint = norm && model_.joint_norm;
    float scale = joint ? norm_scale(x, heads * dim, model_.eps) : 1;
    for (int head = 0; head < heads; head++, x += dim) {
      if (norm && !joint) scale = norm_scale(x, dim, model_.eps);
      visit(head, x, joint ? norm + head * dim : norm, scale);
    }
  }

  void attend(Crew& crew, AttentionPlan& plan, const RlLayer& layer, int index, const T* q,
              size_t stride) const {
    AttentionCall<T> call{};
    call.q = q;
    call.q_stride = stride;
    call.k_cache = keys(index);
    call.v_cache = values(index);
    call.bits = model_.kv_bits;
    call.window = layer.window;
    call.unseen = model_.unseen;
    call.scale = model_.scale;
    call.cap = model_.score_cap;
    call.sinks = layer.sinks;
    call.out = narrow_;
    call.out_stride = narrow_stride_;
    attention(crew, plan, call);
  }

  // Returns attention's result for the wanted tokens, in order; copies their residuals, too.
  const T* attend_to_wanted(Crew& crew, const RlLayer& layer, int index, Clock& clock) const {
    bool few = few_wanted();
    if (!few) {
      attend(crew, space_.plan, layer, index, queries(), query_stride());
      clock.mark(RL_ATTENTION);
    }
    each_row(crew, step_.wanted, [&](int i) {
      int64_t token = step_.wanted_tokens[i], hidden = model_.hidden;
      std::memcpy(wanted_residual_ + i * hidden, residual_ + token * hidden,
                  hidden * sizeof(float));
      const T* from = few ? queries() + token * query_stride() : narrow_ + token * narrow_stride_;
      std::memcpy(wanted_q_ + i * wanted_stride_, from,
                  (few ? q_size_ : attended_size_) * sizeof(T));
    });
    clock.mark(RL_ELEMENTWISE);
    if (!few) return wanted_q_;
    attend(crew, space_.last_plan, layer, index, wanted_q_, wanted_stride_);
    clock.mark(RL_ATTENTION);
    return narrow_;
  }

  RlWorkspace& space_;
  const RlModel& model_;
  const RlStep& step_;
  int q_size_, kv_size_, qkv_size_, attended_size_;
  size_t narrow_stride_, wide_stride_, wanted_stride_;  // elements from row to row
  float* residual_;         // [T, hidden]
  // M, the most rows of a product: the larger of T and N.
  T* narrow_;               // [M, hidden or q]: normed rows, or attention's output
  T* wide_;                 // [M, qkv or inner], or the latents attended to
  float* wanted_residual_;  // [N, hidden]
  T* wanted_q_;             // [N, q]
  size_t ordered_stride_;
  T* ordered_;              // [M, q, hidden or inner]: activations in the order of weights' columns
  T* beside_;               // [M, hidden]: input of the MLP beside attention
  float* branch_;           // [M, hidden]: output that is normed, or summed, before it is added
  Mixture<T> mixture_;
  Latent<T> latent_;
  AdapterMemory<T> lines_{};
};

}  // namespace
}  // namespace rootlace

extern "C" {

void rl_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(RlScheme), sizeof(RlSource), sizeof(RlLinear),
                         sizeof(RlNorm),   sizeof(RlExpert), sizeof(RlLayer),
                         sizeof(RlMixture), sizeof(RlLatent), sizeof(RlLowRank),
                         sizeof(RlModel),  sizeof(RlRows),   sizeof(RlStep),
                         sizeof(RlEdits)};
  for (int64_t size : all) *sizes++ = size;
}

RlWorkspace* rl_workspace_new() {
  RlWorkspace* made = nullptr;
  rootlace::guarded([&] { made = new RlWorkspace; });
  return made;
}

void rl_workspace_free(RlWorkspace* workspace) { delete workspace; }

int32_t rl_forward(void* team, RlWorkspace* workspace, const RlModel* model, const RlStep* step) {
  using namespace rootlace;
  return guarded([&] {
    if (model->dtype == RL_BFLOAT16)
      Forward<bf16>(*workspace, *model, *step).run(*static_cast<Team*>(team));
    else
      Forward<float>(*workspace, *model, *step).run(*static_cast<Team*>(team));
  });
}
}
