#include "attention.h"

#include <algorithm>
#include <utility>

#include "activations.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "guard.h"
#include "kv_codes.h"
#include "kv_layout.h"
#include "runs.h"

namespace rootlace {
namespace {

// Key heads between the head that is computed and the head that is fetched meanwhile. The heads of
// the next block follow a block's last head.
constexpr int AHEAD = 2;

// Online softmax of some queries; a record holds the state of one query.
struct State {
  float* base;    // [queries]
  float* sums;    // [queries, LANES]
  float* values;  // [queries, columns], weighted sums
};

// Task, whose queries are numbered key head by key head, token by token, head by head.
template <class T>
class Work {
 public:
  using Products = ProductsOf<T>;
  static constexpr int MOST_ROWS = Products::MOST_ROWS;

  Work(Crew& crew, AttentionPlan& plan, const AttentionCall<T>& call, const AttentionTask& task)
      : plan_(plan),
        call_(call),
        task_(task),
        group_(plan.shape.heads / plan.shape.kv_heads),
        dim_(plan.shape.head_dim),
        value_dim_(plan.shape.value_dim),
        layout_{plan.shape.kv_heads, plan.shape.head_dim, plan.shape.block_size, plan.shape.plain},
        codes_{plan.shape.kv_heads, plan.shape.head_dim, plan.shape.block_size, call.bits},
        columns_(ceil_div(value_dim_, LANES) * LANES),
        products_(dim_, value_dim_),
        per_head_((task.last - task.first) * group_),
        queries_(per_head_ * (task.kv_end - task.kv_begin)) {
    Arena sizes(nullptr);
    place(sizes);
    Arena arena(crew.scratch(sizes.used()));
    place(arena);
  }

  void run() {
    look_at_positions();
    copy_queries();
    products_.begin(std::min(per_head_, MOST_ROWS));
    int block = task_.low;
    bool merged = false;
    if (task_.finish) merged = merge_records();
    while (block < task_.high) {
      const int segment = block / SEGMENT_BLOCKS;
      const int end = std::min(task_.high, (segment + 1) * SEGMENT_BLOCKS);
      if (block % SEGMENT_BLOCKS) {
        load_state(segment);
      } else {
        clear(now_);
      }
      attend_all(std::max(block, first_visible_), end);
      block = end;
      if (!task_.finish) {
        save_state(segment);
      } else if (merged || block < task_.high) {
        if (!merged) clear(total_);
        for (int i = 0; i < queries_; i++)
          merge(i, now_.base[i], now_.sums + i * LANES, now_.values + (size_t)i * columns_);
        merged = true;
      }
    }
    if (task_.finish) write(merged ? total_ : now_);
  }

 private:
  void place(Arena& arena) {
    queries_at_ = arena.take<T>((size_t)queries_ * products_.query_stride());
    positions_ = arena.take<int>(per_head_);
    for (State* state : {&now_, &total_}) {
      state->base = arena.take<float>(queries_);
      state->sums = arena.take<float>((size_t)queries_ * LANES);
      state->values = arena.take<float>((size_t)queries_ * columns_);
    }
    products_.place(arena, !as_they_lie());
    scores_ = arena.take<float>(MOST_ROWS * KEY_BLOCK);
    weights_ = arena.take<T>(MOST_ROWS * KEY_BLOCK);
  }

  // Returns whether the cache has the panels that products read.
  bool as_they_lie() const { return !codes_.bits && layout_.panels(); }

  void look_at_positions() {
    int* to = positions_;
    for (int i = task_.first; i < task_.last; i++)
      to = std::fill_n(to, group_, plan_.tokens[i].position);
    lowest_ = *std::min_element(positions_, to);
    highest_ = *std::max_element(positions_, to);
    first_visible_ = first_seen(lowest_) / KEY_BLOCK;
    keys_end_ = std::min(task_.high * KEY_BLOCK, highest_ + 1);
  }

  // Returns the first position that a token attends to.
  int first_seen(int position) const {
    const int window = call_.window > 0 ? call_.window : 1 << 30;
    return std::max(position - window + 1, call_.unseen);
  }

  void copy_queries() {
    const int stride = products_.query_stride();
    T* to = queries_at_;
    for (int head = task_.kv_begin * group_; head < task_.kv_end * group_; head += group_)
      for (int i = task_.first; i < task_.last; i++)
        for (int j = 0; j < group_; j++, to += stride) {
          const T* from = call_.q + plan_.tokens[i].token * call_.q_stride + (head + j) * dim_;
          std::copy_n(from, dim_, to);
          std::fill(to + dim_, to + stride, T{});
        }
  }

  void clear(State& state) {
    std::fill_n(state.base, queries_, NOTHING);
    std::fill_n(state.sums, (size_t)queries_ * LANES, 0.0f);
    std::fill_n(state.values, (size_t)queries_ * columns_, 0.0f);
  }

  // Returns the slot of a position.
  int64_t slot(int position) const {
    const int size = plan_.shape.block_size;
    const int32_t* table = plan_.rows.block_tables + (size_t)task_.row * plan_.rows.width;
    return (int64_t)table[position / size] * size + position % size;
  }

  // Returns the addresses of a key block's panels in the cache, for head 0. Panels behind the last
  // one that is read repeat it.
  void find_panels(int block, int64_t* at) const {
    for (int i = 0; i < PANELS; i++) {
      const int key = block * KEY_BLOCK + i * LANES;
      at[i] = key < keys_end_ ? layout_.panel(slot(key), 0) : at[i - 1];
    }
  }

  KeyPanels<T> panels_of(const int64_t* at, int head) const {
    KeyPanels<T> panels;
    for (int i = 0; i < PANELS; i++) {
      const int64_t own = at[i] + (int64_t)head * plan_.shape.block_size * dim_;
      panels.keys[i] = static_cast<const T*>(call_.k_cache) + own;
      panels.values[i] = static_cast<const T*>(call_.v_cache) + own;
    }
    return panels;
  }

  // Makes panels of plain rows. Keys behind the last one that is read repeat it.
  KeyPanels<T> pack_panels(int block, int head) {
    const int first = block * KEY_BLOCK, count = std::min(KEY_BLOCK, keys_end_ - first);
    int64_t offsets[KEY_BLOCK];
    for (int i = 0; i < KEY_BLOCK; i++)
      offsets[i] = i < count ? (slot(first + i) * plan_.shape.kv_heads + head) * dim_
                             : offsets[i - 1];
    return products_.pack(static_cast<const T*>(call_.k_cache),
                          static_cast<const T*>(call_.v_cache), offsets, count);
  }

  // Returns the addresses of a key block's codes. Panels behind the last one that is read repeat
  // it.
  CodePanels codes_of(int block, int head) const {
    const auto* keys = static_cast<const uint8_t*>(call_.k_cache);
    const auto* values = static_cast<const uint8_t*>(call_.v_cache);
    CodePanels panels;
    panels.apart = codes_.block_size;
    for (int i = 0; i < PANELS; i++) {
      const int key = block * KEY_BLOCK + i * LANES;
      const int64_t first = slot(key < keys_end_ ? key : (keys_end_ - 1) / LANES * LANES);
      const int64_t codes = codes_.codes(first, head), words = codes_.words(first, head);
      panels.keys[i] = keys + codes;
      panels.values[i] = values + codes;
      panels.key_words[i] = reinterpret_cast<const uint32_t*>(keys + words);
      panels.value_words[i] = reinterpret_cast<const uint32_t*>(values + words);
    }
    return panels;
  }

  // Makes panels of codes.
  KeyPanels<T> unpack_panels(int block, int head) {
    const CodePanels now = codes_of(block, head);
    CodePanels later;
    const int heads = task_.kv_end - task_.kv_begin, at = head - task_.kv_begin + AHEAD;
    const bool fetches = (block + at / heads) * KEY_BLOCK < keys_end_;
    if (fetches) later = codes_of(block + at / heads, task_.kv_begin + at % heads);
    const int count = std::min(KEY_BLOCK, keys_end_ - block * KEY_BLOCK);
    return products_.unpack(codes_.bits, now, fetches ? &later : nullptr, count);
  }

  // Computes the key blocks of one segment, and meanwhile fetches later ones.
  void attend_all(int begin, int end) {
    end = std::min(end, ceil_div(keys_end_, KEY_BLOCK));  // a row's first tokens see fewer keys
    if (begin >= end) return;
    const int parts = ceil_div(per_head_, MOST_ROWS);
    const int last_head = task_.kv_end - 1;
    int64_t at[2][PANELS];
    if (as_they_lie()) find_panels(begin, at[begin & 1]);
    for (int block = begin; block < end; block++) {
      const int start = block * KEY_BLOCK;
      const bool whole = start + KEY_BLOCK <= lowest_ + 1 && start >= first_seen(highest_);
      const bool more = (block + 1) * KEY_BLOCK < keys_end_;
      if (more && as_they_lie()) find_panels(block + 1, at[(block + 1) & 1]);
      for (int head = task_.kv_begin; head <= last_head; head++) {
        KeyPanels<T> now, later;
        const int ahead = head + AHEAD;
        bool fetches = as_they_lie();
        if (codes_.bits) {
          now = unpack_panels(block, head);
        } else if (!fetches) {
          now = pack_panels(block, head);
        } else {
          now = panels_of(at[block & 1], head);
          if (ahead <= last_head)
            later = panels_of(at[block & 1], ahead);
          else if (more)
            later = panels_of(at[(block + 1) & 1],
                              std::min(task_.kv_begin + ahead - last_head - 1, last_head));
          else
            fetches = false;
        }
        products_.take(now, std::min(KEY_BLOCK, keys_end_ - start));
        for (int i = 0; i < parts; i++)
          attend(start, whole, (head - task_.kv_begin) * per_head_, cut(per_head_, i, parts),
                 cut(per_head_, i + 1, parts), fetches && i + 1 == parts ? &later : nullptr);
      }
    }
  }

  // Computes queries offset + begin : offset + end, at most MOST_ROWS, and the keys from `start`
  // on. `whole`: all of the task's queries see all of these keys.
  void attend(int start, bool whole, int offset, int begin, int end, const KeyPanels<T>* next) {
    const int rows = end - begin, first = offset + begin;
    const int* position = positions_ + begin;
    int count = KEY_BLOCK;
    if (!whole) {
      const int most = *std::max_element(position, position + rows);
      const int least = *std::min_element(position, position + rows);
      count = std::min(KEY_BLOCK, std::min(keys_end_, most + 1) - start);
      if (count <= 0 || start + KEY_BLOCK <= first_seen(least)) return;
    }
    const int vecs = ceil_div(count, LANES);
    products_.score(queries_at_ + (size_t)first * products_.query_stride(), rows, vecs, scores_, next);
    if (call_.cap > 0) cap(rows, vecs);
    float keep[MOST_ROWS];
    for (int i = 0; i < rows; i++)
      keep[i] = soften(scores_ + i * KEY_BLOCK, vecs,
                       whole ? 0 : first_seen(position[i]) - start,
                       whole ? KEY_BLOCK : position[i] + 1 - start, scale(), now_.base[first + i],
                       now_.sums + (first + i) * LANES, weights_ + i * KEY_BLOCK);
    products_.weigh(weights_, rows, count, now_.values + (size_t)first * columns_, keep, next);
  }

  // Replaces scores by tanh(score / cap).
  void cap(int rows, int vecs) const {
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < vecs * LANES; j += LANES) {
        float* at = scores_ + i * KEY_BLOCK + j;
        store(at, tanh<T>(load(at) * (call_.scale / call_.cap)));
      }
  }

  // Factor from `scores_` to exponents of 2.
  float scale() const {
    return (call_.cap > 0 ? call_.cap : call_.scale) * 1.44269504088896341f;
  }

  template <class Visit>
  void each_query(Visit visit) const {
    int i = 0;
    for (int head = task_.kv_begin; head < task_.kv_end; head++)
      for (int token = task_.first; token < task_.last; token++)
        for (int h = 0; h < group_; h++) visit(i++, plan_.tokens[token].token, head * group_ + h);
  }

  // Records: [0] base, [LANES] sums, [2 LANES] values.
  void load_state(int segment) {
    each_query([&](int i, int token, int head) {
      const float* record = plan_.record(token, head, segment);
      now_.base[i] = record[0];
      std::memcpy(now_.sums + i * LANES, record + LANES, LANES * 4);
      std::memcpy(now_.values + (size_t)i * columns_, record + 2 * LANES, columns_ * 4);
    });
  }

  void save_state(int segment) {
    each_query([&](int i, int token, int head) {
      float* record = plan_.record(token, head, segment);
      record[0] = now_.base[i];
      std::memcpy(record + LANES, now_.sums + i * LANES, LANES * 4);
      std::memcpy(record + 2 * LANES, now_.values + (size_t)i * columns_, columns_ * 4);
    });
  }

  // Adds all segments that other tasks have finished, in order. Returns false if there are none.
  bool merge_records() {
    int count = task_.low / SEGMENT_BLOCKS;
    if (task_.low == task_.high) count = ceil_div(task_.low, SEGMENT_BLOCKS);
    if (count == 0) return false;
    clear(total_);
    each_query([&](int i, int token, int head) {
      for (int segment = 0; segment < count; segment++) {
        const float* record = plan_.record(token, head, segment);
        merge(i, record[0], record + LANES, record + 2 * LANES);
      }
    });
    return true;
  }

  // Adds a segment of query i to its total. Compiled once: another copy might round differently.
  [[gnu::noinline]] void merge(int i, float base, const float* sums, const float* values) {
    if (base == NOTHING) {
      if (sum(load(sums)) == 0) return;
      base = 0;  // scores are NaN, and the total becomes NaN, too
    }
    const float before = total_.base[i];
    const float top = base > before ? base : before;
    const float keep = exp2_of(before - top), add = exp2_of(base - top);
    float* to = total_.sums + i * LANES;
    store(to, load(to) * keep + load(sums) * add);
    to = total_.values + (size_t)i * columns_;
    for (int j = 0; j < columns_; j += LANES)
      store(to + j, load(to + j) * keep + load(values + j) * add);
    total_.base[i] = top;
  }

  void write(const State& state) const {
    each_query([&](int i, int token, int head) {
      float weight = sum(load(state.sums + i * LANES));
      if (call_.sinks) weight += exp2_of(call_.sinks[head] * 1.44269504f - state.base[i]);
      const float factor = 1.0f / weight;
      const float* values = state.values + (size_t)i * columns_;
      T* out = call_.out + token * call_.out_stride + (size_t)head * value_dim_;
      int j = 0;
      for (; j + LANES <= value_dim_; j += LANES) store(out + j, load(values + j) * factor);
      for (; j < value_dim_; j++) store(out + j, values[j] * factor);
      if (call_.lse)
        call_.lse[(size_t)token * plan_.shape.heads + head] =
            (state.base[i] + std::log2(weight)) * 0.69314718055994531f;
    });
  }

  AttentionPlan& plan_;
  const AttentionCall<T>& call_;
  const AttentionTask& task_;
  const int group_, dim_, value_dim_;
  const KvLayout<T> layout_;
  const KvCodes codes_;
  const int columns_;
  Products products_;
  const int per_head_, queries_;
  int lowest_, highest_;  // positions
  int first_visible_;     // key block
  int keys_end_;          // end of the positions that are read
  T* queries_at_;         // [queries, dim]
  int* positions_;        // [per_head]
  State now_, total_;     // of the current segment; of earlier segments
  float* scores_;         // [MOST_ROWS, KEY_BLOCK]
  T* weights_;            // [MOST_ROWS, KEY_BLOCK]
};

}  // namespace

template <class T>
void attention(Crew& crew, AttentionPlan& plan, const AttentionCall<T>& call) {
  int begin = 0;
  for (int end : plan.phase_end) {
    crew.each(end - begin, [&](int i) { Work<T>(crew, plan, call, plan.tasks[begin + i]).run(); });
    begin = end;
  }
}

template void attention(Crew&, AttentionPlan&, const AttentionCall<float>&);
template void attention(Crew&, AttentionPlan&, const AttentionCall<bf16>&);

}  // namespace rootlace

namespace {

template <class T>
void run(rootlace::Team& team, rootlace::AttentionPlan& plan, rootlace::AttentionCall<T> call,
         int layers, int64_t layer_stride) {
  team.run([&](rootlace::Crew& crew) {
    rootlace::AttentionCall<T> mine = call;
    for (int layer = 0; layer < layers; layer++) {
      rootlace::attention(crew, plan, mine);
      mine.k_cache = static_cast<const char*>(mine.k_cache) + layer_stride;
      mine.v_cache = static_cast<const char*>(mine.v_cache) + layer_stride;
    }
  });
}

}  // namespace

extern "C" int32_t rl_attention(void* team, int32_t dtype, int32_t heads, int32_t kv_heads,
                                int32_t head_dim, int32_t block_size, int32_t kv_bits,
                                const RlRows* rows, const void* q, int64_t q_stride,
                                const void* k_cache, const void* v_cache, int32_t layers,
                                int64_t layer_stride, int32_t window, float scale, float cap,
                                void* out, float* lse) {
  rootlace::Team& threads = *static_cast<rootlace::Team*>(team);
  const size_t width = (size_t)heads * head_dim;
  auto call = [&](auto one) {
    using T = decltype(one);
    rootlace::SharedRuns runs;
    rootlace::AttentionPlan plan;
    plan.make({heads, kv_heads, head_dim, block_size, head_dim}, runs.added_to(*rows, block_size),
              threads.size());
    run<T>(threads, plan,
           {static_cast<const T*>(q), (size_t)q_stride, k_cache, v_cache, kv_bits, window, 0, scale,
            cap, static_cast<T*>(out), width, lse},
           layers, layer_stride);
  };
  return rootlace::guarded([&] {
    if (dtype == RL_BFLOAT16)
      call(rootlace::bf16{});
    else
      call(0.0f);
  });
}
