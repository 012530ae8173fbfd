#include "attention.h"

#include <algorithm>
#include <utility>

#include "attention_pack.h"
#include "attention_softmax.h"
#include "kv_layout.h"
#include "tile.h"

namespace rootlace {
namespace {

constexpr int MOST_ROWS = 6;

// The most vectors of a product with so many rows: its sums stay in registers.
#if defined(__AVX512F__)
constexpr int most_vecs(int) { return 4; }
#else
constexpr int most_vecs(int rows) { return tile_vecs(rows); }
#endif
constexpr int MOST_VECS = 4;

constexpr int PANELS = KEY_BLOCK / LANES;  // of a key block
// What is fetched while a key block is computed: that so many key heads, block by block, later.
constexpr int AHEAD = 2;

// Where the panels of a key block are, of one key head. Behind the last panel with keys stands that
// one again.
template <class T>
struct Panels {
  const T* keys[PANELS];
  const T* values[PANELS];
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline int cut(int total, int part, int parts) { return (int)((int64_t)total * part / parts); }

#if defined(__AVX512BF16__)
// As `detail::step_at`. GCC would load the panel again for each row.
template <int ROWS, int VECS, class Panel>
[[gnu::always_inline]] inline void add_step(const bf16* a, size_t lda, Panel at,
                                            detail::Sums<ROWS, VECS>& sums) {
  __m512bh panel[VECS];
#pragma GCC unroll 16
  for (int j = 0; j < VECS; j++) {
    panel[j] = detail::load_as<__m512bh>(at(j));
    asm("" : "+v"(panel[j]));
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++) {
    __m512bh pair = (__m512bh)_mm512_set1_epi32(detail::load_as<int32_t>(a + i * lda));
#pragma GCC unroll 16
    for (int j = 0; j < VECS; j++)
      sums.at[i][j] = (Native)_mm512_dpbf16_ps((__m512)sums.at[i][j], pair, panel[j]);
  }
}
#endif

template <int ROWS, int COLUMNS, class T, class Panel>
[[gnu::always_inline]] inline void add_step(const T* a, size_t lda, Panel at,
                                            detail::Sums<ROWS, COLUMNS>& sums) {
  detail::step_at(a, lda, at, sums);
}

template <int ROWS, int COLUMNS>
[[gnu::always_inline]] inline void put(const detail::Sums<ROWS, COLUMNS>& sums, float* c,
                                       size_t ldc) {
  asm("" : "+r"(c), "+r"(ldc));  // else compilers keep the addresses of all rows in registers
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      std::memcpy(c + i * ldc + j * NATIVE, &sums.at[i][j], sizeof(Native));
}

// Where the registers of a step of VECS panels of keys lie.
template <class T, int VECS>
struct KeyStep {
  const T* const* panels;
  int64_t from;
  [[gnu::always_inline]] const T* operator()(int column) const {
    constexpr int EACH = LANES / NATIVE;
    return panels[column / EACH] + from + column % EACH * NATIVE * STEP<T>;
  }
};

// scores[ROWS, VECS * 16] of queries [ROWS, dim] and as many panels of keys. Meanwhile the panels
// at `next` are fetched, if there are any.
template <int ROWS, int VECS, class T>
void score(const T* queries, int dim, const T* const* panels, float* scores, size_t ldc,
           const T* const* next) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++) sums.at[i][j] = Native{};
  const T* keys[VECS];
#pragma GCC unroll 4
  for (int j = 0; j < VECS; j++) keys[j] = panels[j];
  const int64_t end = (int64_t)dim * LANES;
  const T* a = queries;
  for (int64_t k = 0; k < end; k += LANES * STEP<T>, a += STEP<T>) {
    if (next)
      for (int i = 0; i < PANELS; i++) __builtin_prefetch(next[i] + k);
    add_step(a, dim, KeyStep<T, VECS>{keys, k}, sums);
  }
  put(sums, scores, ldc);
}

// values[ROWS, VECS * 16] = values * keep[row] + weights [ROWS, KEY_BLOCK] of `count` keys x as
// many columns of theirs, from `column` of `columns` on. `tail`: the last word of these, if there
// is half a word.
template <int ROWS, int VECS, class T>
void weigh(const T* weights, int count, const T* const* panels, int column, int columns,
           const T* tail, float* values, const float* keep, const T* const* next) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      sums.at[i][j] =
          detail::load_as<Native>(values + (size_t)i * columns + j * NATIVE) * keep[i];
  const int64_t row = (int64_t)columns * STEP<T>;
  const int lines = columns / LANES;
  int left = count / STEP<T>;
  for (int panel = 0; left > 0; panel++) {
    const T* b = panels[panel] + column * STEP<T>;
    const T* fetched = next ? next[panel] : nullptr;
    const int steps = std::min(left, LANES / STEP<T>);
    left -= steps;
    for (int k = 0; k < steps; k++, b += row, weights += STEP<T>) {
      if (fetched) {
        for (int i = 0; i < lines; i++) __builtin_prefetch(fetched + i * LANES * STEP<T>);
        fetched += row;
      }
      add_step(weights, KEY_BLOCK, detail::Row<T>{b}, sums);
    }
  }
  if (tail) add_step(weights, KEY_BLOCK, detail::Row<T>{tail + column * STEP<T>}, sums);
  put(sums, values, columns);
}

template <class T>
using Score = void (*)(const T*, int, const T* const*, float*, size_t, const T* const*);
template <class T>
using Weigh = void (*)(const T*, int, const T* const*, int, int, const T*, float*, const float*,
                       const T* const*);

template <class T, int ROWS, int VECS>
constexpr Score<T> score_of() {
  if constexpr (VECS <= most_vecs(ROWS)) return score<ROWS, VECS, T>;
  return nullptr;
}
template <class T, int ROWS, int VECS>
constexpr Weigh<T> weigh_of() {
  if constexpr (VECS <= most_vecs(ROWS)) return weigh<ROWS, VECS, T>;
  return nullptr;
}

// By rows - 1, vectors - 1.
template <class T>
struct Products {
  Score<T> score[MOST_ROWS][MOST_VECS];
  Weigh<T> weigh[MOST_ROWS][MOST_VECS];
};
template <class T, int... ROWS>
constexpr Products<T> products(std::integer_sequence<int, ROWS...>) {
  return {{{score_of<T, ROWS + 1, 1>(), score_of<T, ROWS + 1, 2>(), score_of<T, ROWS + 1, 3>(),
            score_of<T, ROWS + 1, 4>()}...},
          {{weigh_of<T, ROWS + 1, 1>(), weigh_of<T, ROWS + 1, 2>(), weigh_of<T, ROWS + 1, 3>(),
            weigh_of<T, ROWS + 1, 4>()}...}};
}
template <class T>
constexpr Products<T> PRODUCTS = products<T>(std::make_integer_sequence<int, MOST_ROWS>());

// `visit(from, to)` for vectors 0 .. vecs - 1 in groups that a product of so many rows takes.
template <class Visit>
inline void each_group(int rows, int vecs, Visit&& visit) {
  const int groups = ceil_div(vecs, most_vecs(rows));
  for (int g = 0; g < groups; g++) visit(cut(vecs, g, groups), cut(vecs, g + 1, groups));
}

// Hands out parts of one piece of memory, each 64-byte aligned; without memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class U>
  U* take(size_t count) {
    size_t at = used_;
    used_ += (count * sizeof(U) + 63) / 64 * 64;
    return memory_ ? reinterpret_cast<U*>(memory_ + at) : nullptr;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

// Online softmax of some queries: what a record holds of one.
struct State {
  float* base;    // [queries]
  float* sums;    // [queries, LANES]
  float* values;  // [queries, columns], weighted and added up
};

// One task: its queries are numbered key head by key head, token by token, head by head.
template <class T>
class Work {
 public:
  Work(Crew& crew, AttentionPlan& plan, const AttentionCall<T>& call, const AttentionTask& task)
      : plan_(plan),
        call_(call),
        task_(task),
        group_(plan.shape.heads / plan.shape.kv_heads),
        dim_(plan.shape.head_dim),
        layout_{plan.shape.kv_heads, plan.shape.head_dim, plan.shape.block_size},
        columns_(ceil_div(plan.shape.head_dim, LANES) * LANES),
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
    std::fill_n(tail_, columns_ * STEP<T>, T{});
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
    queries_at_ = arena.take<T>((size_t)queries_ * dim_);
    positions_ = arena.take<int>(per_head_);
    for (State* state : {&now_, &total_}) {
      state->base = arena.take<float>(queries_);
      state->sums = arena.take<float>((size_t)queries_ * LANES);
      state->values = arena.take<float>((size_t)queries_ * columns_);
    }
    if (!layout_.panels()) {
      keys_ = arena.take<T>((size_t)dim_ * KEY_BLOCK);
      values_ = arena.take<T>((size_t)columns_ * KEY_BLOCK);
    }
    tail_ = arena.take<T>((size_t)columns_ * STEP<T>);
    scores_ = arena.take<float>(MOST_ROWS * KEY_BLOCK);
    weights_ = arena.take<T>(MOST_ROWS * KEY_BLOCK);
  }

  void look_at_positions() {
    int* to = positions_;
    for (int i = task_.first; i < task_.last; i++)
      to = std::fill_n(to, group_, plan_.tokens[i].position);
    lowest_ = *std::min_element(positions_, to);
    highest_ = *std::max_element(positions_, to);
    first_visible_ = std::max(lowest_ - window() + 1, 0) / KEY_BLOCK;
    keys_end_ = std::min(task_.high * KEY_BLOCK, highest_ + 1);
  }

  int window() const { return call_.window > 0 ? call_.window : 1 << 30; }

  void copy_queries() {
    const size_t size = (size_t)group_ * dim_;
    T* to = queries_at_;
    for (int head = task_.kv_begin; head < task_.kv_end; head++)
      for (int i = task_.first; i < task_.last; i++, to += size)
        std::memcpy(to, call_.q + plan_.tokens[i].token * call_.q_stride + head * size,
                    size * sizeof(T));
  }

  void clear(State& state) {
    std::fill_n(state.base, queries_, NOTHING);
    std::fill_n(state.sums, (size_t)queries_ * LANES, 0.0f);
    std::fill_n(state.values, (size_t)queries_ * columns_, 0.0f);
  }

  // The slot of a position.
  int64_t slot(int position) const {
    const int size = plan_.shape.block_size;
    const int32_t* table = plan_.rows.block_tables + (size_t)task_.row * plan_.rows.width;
    return (int64_t)table[position / size] * size + position % size;
  }

  // Where the panels of a key block lie in the cache, of head 0. Behind the last one that is read
  // stands that one again.
  void find_panels(int block, int64_t* at) const {
    for (int i = 0; i < PANELS; i++) {
      const int key = block * KEY_BLOCK + i * LANES;
      at[i] = key < keys_end_ ? layout_.panel(slot(key), 0) : at[i - 1];
    }
  }

  Panels<T> panels_of(const int64_t* at, int head) const {
    Panels<T> panels;
    for (int i = 0; i < PANELS; i++) {
      const int64_t own = at[i] + (int64_t)head * plan_.shape.block_size * dim_;
      panels.keys[i] = call_.k_cache + own;
      panels.values[i] = call_.v_cache + own;
    }
    return panels;
  }

  // Panels made of plain rows. Behind the last key that is read stands that key again.
  Panels<T> pack_panels(int block, int head) {
    const int first = block * KEY_BLOCK, count = std::min(KEY_BLOCK, keys_end_ - first);
    int64_t offsets[KEY_BLOCK];
    for (int i = 0; i < KEY_BLOCK; i++)
      offsets[i] = i < count ? (slot(first + i) * plan_.shape.kv_heads + head) * dim_
                             : offsets[i - 1];
    pack_keys(call_.k_cache, offsets, ceil_div(count, LANES) * LANES, dim_, keys_);
    pack_values(call_.v_cache, offsets, ceil_div(count, 2) * 2, dim_, columns_, values_);
    Panels<T> panels;
    for (int i = 0; i < PANELS; i++) {
      panels.keys[i] = keys_ + i * LANES * dim_;
      panels.values[i] = values_ + i * LANES * columns_;
    }
    return panels;
  }

  // Key blocks of one segment. While one is computed for a key head, what comes later is fetched.
  void attend_all(int begin, int end) {
    end = std::min(end, ceil_div(keys_end_, KEY_BLOCK));  // the first of a row's tokens see less
    if (begin >= end) return;
    const int parts = ceil_div(per_head_, MOST_ROWS);
    const int last_head = task_.kv_end - 1;
    int64_t at[2][PANELS];
    if (layout_.panels()) find_panels(begin, at[begin & 1]);
    for (int block = begin; block < end; block++) {
      const int start = block * KEY_BLOCK;
      const bool whole = start + KEY_BLOCK <= lowest_ + 1 && start > highest_ - window();
      const bool more = layout_.panels() && (block + 1) * KEY_BLOCK < keys_end_;
      if (more) find_panels(block + 1, at[(block + 1) & 1]);
      for (int head = task_.kv_begin; head <= last_head; head++) {
        Panels<T> now, later;
        const int ahead = head + AHEAD;
        bool fetches = layout_.panels();
        if (!fetches) {
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
        for (int i = 0; i < parts; i++)
          attend(start, whole, (head - task_.kv_begin) * per_head_, cut(per_head_, i, parts),
                 cut(per_head_, i + 1, parts), now, fetches && i + 1 == parts ? &later : nullptr);
      }
    }
  }

  // Queries offset + begin : offset + end, at most MOST_ROWS, and the keys from `start` on.
  // `whole`: all of the task's queries see all of them.
  void attend(int start, bool whole, int offset, int begin, int end, const Panels<T>& panels,
              const Panels<T>* next) {
    const int rows = end - begin, first = offset + begin;
    const int* position = positions_ + begin;
    int count = KEY_BLOCK;
    if (!whole) {
      const int most = *std::max_element(position, position + rows);
      const int least = *std::min_element(position, position + rows);
      count = std::min(KEY_BLOCK, std::min(keys_end_, most + 1) - start);
      if (count <= 0 || start + KEY_BLOCK <= least - window() + 1) return;
    }
    const int vecs = ceil_div(count, LANES);
    const T* queries = queries_at_ + (size_t)first * dim_;
    each_group(rows, vecs, [&](int from, int to) {
      PRODUCTS<T>.score[rows - 1][to - from - 1](queries, dim_, panels.keys + from,
                                                 scores_ + from * LANES, KEY_BLOCK,
                                                 next && from == 0 ? next->keys : nullptr);
    });
    float keep[MOST_ROWS];
    for (int i = 0; i < rows; i++)
      keep[i] = soften(scores_ + i * KEY_BLOCK, vecs,
                       whole ? 0 : position[i] - window() + 1 - start,
                       whole ? KEY_BLOCK : position[i] + 1 - start, scale(), now_.base[first + i],
                       now_.sums + (first + i) * LANES, weights_ + i * KEY_BLOCK);
    const T* tail = nullptr;
    if (count % STEP<T>) {
      // What stands behind the last key is nobody's, and may not be a number.
      const T* word = panels.values[count / LANES] + count % LANES / STEP<T> * STEP<T> * columns_;
      for (int i = 0; i < columns_; i++) tail_[i * STEP<T>] = word[i * STEP<T>];
      tail = tail_;
    }
    float* values = now_.values + (size_t)first * columns_;
    each_group(rows, columns_ / LANES, [&](int from, int to) {
      PRODUCTS<T>.weigh[rows - 1][to - from - 1](weights_, count, panels.values, from * LANES,
                                                 columns_, tail, values + from * LANES, keep,
                                                 next && from == 0 ? next->values : nullptr);
    });
  }

  float scale() const { return call_.scale * 1.44269504088896341f; }  // exponents of 2

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

  // All segments that other tasks have finished, in order. False: there are none.
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

  // A segment of query i into its total. Compiled once: another copy might round in another way.
  [[gnu::noinline]] void merge(int i, float base, const float* sums, const float* values) {
    if (base == NOTHING) {
      if (sum(load(sums)) == 0) return;
      base = 0;  // no key could be compared: they are not numbers, and neither shall the total be
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
      const float weight = sum(load(state.sums + i * LANES));
      const float factor = 1.0f / weight;
      const float* values = state.values + (size_t)i * columns_;
      T* out = call_.out + token * call_.out_stride + (size_t)head * dim_;
      int j = 0;
      for (; j + LANES <= dim_; j += LANES) store(out + j, load(values + j) * factor);
      for (; j < dim_; j++) store(out + j, values[j] * factor);
      if (call_.lse)
        call_.lse[(size_t)token * plan_.shape.heads + head] =
            (state.base[i] + std::log2(weight)) * 0.69314718055994531f;
    });
  }

  AttentionPlan& plan_;
  const AttentionCall<T>& call_;
  const AttentionTask& task_;
  const int group_, dim_;
  const KvLayout<T> layout_;
  const int columns_;
  const int per_head_, queries_;
  int lowest_, highest_;  // positions
  int first_visible_;     // key block
  int keys_end_;          // positions from here on are not read
  T* queries_at_;         // [queries, dim]
  int* positions_;        // [per_head]
  State now_, total_;     // of the segment at hand; of those before it
  T *keys_, *values_;     // packed, where they are not so in the cache
  T* tail_;               // [columns, STEP], the second halves zero
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
      mine.k_cache += layer_stride;
      mine.v_cache += layer_stride;
    }
  });
}

}  // namespace

extern "C" void rl_attention(void* team, int32_t dtype, int32_t heads, int32_t kv_heads,
                             int32_t head_dim, int32_t block_size, const RlRows* rows,
                             const void* q, int64_t q_stride, const void* k_cache,
                             const void* v_cache, int32_t layers, int64_t layer_stride,
                             int32_t window, float scale, void* out, float* lse) {
  rootlace::Team& threads = *static_cast<rootlace::Team*>(team);
  rootlace::AttentionPlan plan;
  plan.make({heads, kv_heads, head_dim, block_size}, *rows, threads.size());
  const size_t width = (size_t)heads * head_dim;
  auto call = [&](auto one) {
    using T = decltype(one);
    run<T>(threads, plan,
           {static_cast<const T*>(q), (size_t)q_stride, static_cast<const T*>(k_cache),
            static_cast<const T*>(v_cache), window, scale, static_cast<T*>(out), width, lse},
           layers, layer_stride);
  };
  if (dtype == RL_BFLOAT16) {
    call(rootlace::bf16{});
  } else {
    call(0.0f);
  }
}
