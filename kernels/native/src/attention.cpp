#include "attention.h"

#include <algorithm>

#include "attention_pack.h"
#include "attention_softmax.h"
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

// What is fetched into the cache meanwhile: `lines` from each address on.
struct Fetch {
  const char* at[KEY_BLOCK];
  int lines;
};

constexpr int FETCHES = 16;  // in so many portions, evenly spread

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline int cut(int total, int part, int parts) { return (int)((int64_t)total * part / parts); }

#if defined(__AVX512BF16__)
// As `detail::step`. GCC would load the panel again for each row.
template <int ROWS, int VECS>
[[gnu::always_inline]] inline void add_step(const bf16* a, size_t lda, const bf16* b,
                                            detail::Sums<ROWS, VECS>& sums) {
  __m512bh panel[VECS];
#pragma GCC unroll 16
  for (int j = 0; j < VECS; j++) {
    panel[j] = detail::load_as<__m512bh>(b + j * NATIVE * 2);
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

template <int ROWS, int COLUMNS, class T>
[[gnu::always_inline]] inline void add_step(const T* a, size_t lda, const T* b,
                                            detail::Sums<ROWS, COLUMNS>& sums) {
  detail::step(a, lda, b, sums);
}

// c[ROWS, VECS * 16] = c * keep[row] + a b, with `keep` null: a b. As `tile`, depth even. `fetch`
// may be null.
template <int ROWS, int VECS, class T>
void product(const T* a, size_t lda, const T* b, size_t ldb, int depth, float* c, size_t ldc,
             const float* keep, const Fetch* fetch) {
  constexpr int COLUMNS = VECS * LANES / NATIVE;
  detail::Sums<ROWS, COLUMNS> sums;
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      sums.at[i][j] = keep ? detail::load_as<Native>(c + i * ldc + j * NATIVE) * keep[i] : Native{};
  const int steps = depth / STEP<T>, stretches = fetch ? FETCHES : 1;
  int k = 0;
  for (int stretch = 0; stretch < stretches; stretch++) {
    if (fetch)
      for (int i = 0; i < fetch->lines; i++)
        for (int j = 0; j < KEY_BLOCK / FETCHES; j++)
          __builtin_prefetch(fetch->at[stretch * (KEY_BLOCK / FETCHES) + j] + i * 64);
    const int stop = fetch ? steps * (stretch + 1) / FETCHES : steps;
    for (; k < stop; k++, a += STEP<T>, b += ldb) add_step(a, lda, b, sums);
  }
  asm("" : "+r"(c), "+r"(ldc));  // else compilers keep the addresses of all rows in registers
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
    for (int j = 0; j < COLUMNS; j++)
      std::memcpy(c + i * ldc + j * NATIVE, &sums.at[i][j], sizeof(Native));
}

template <class T>
using Product = void (*)(const T*, size_t, const T*, size_t, int, float*, size_t, const float*,
                         const Fetch*);

template <int ROWS, int VECS, class T>
constexpr Product<T> product_of() {
  if constexpr (VECS <= most_vecs(ROWS)) return product<ROWS, VECS, T>;
  return nullptr;
}

template <class T, int ROWS>
constexpr Product<T> PRODUCTS_OF[MOST_VECS] = {product_of<ROWS, 1, T>(), product_of<ROWS, 2, T>(),
                                               product_of<ROWS, 3, T>(), product_of<ROWS, 4, T>()};

template <class T>
constexpr const Product<T>* PRODUCTS[MOST_ROWS] = {PRODUCTS_OF<T, 1>, PRODUCTS_OF<T, 2>,
                                                   PRODUCTS_OF<T, 3>, PRODUCTS_OF<T, 4>,
                                                   PRODUCTS_OF<T, 5>, PRODUCTS_OF<T, 6>};

// The same with any number of vectors, rows of b and c being as long as they are.
template <class T>
void multiply(const T* a, size_t lda, int rows, const T* b, size_t columns, int vecs, int depth,
              float* c, const float* keep, const Fetch* fetch) {
  const int groups = ceil_div(vecs, most_vecs(rows));
  for (int g = 0; g < groups; g++) {
    const int from = cut(vecs, g, groups), to = cut(vecs, g + 1, groups);
    PRODUCTS<T>[rows - 1][to - from - 1](a, lda, b + from * LANES * STEP<T>, columns * STEP<T>,
                                         depth, c + from * LANES, columns, keep,
                                         g == 0 ? fetch : nullptr);
  }
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
    keys_ = arena.take<T>((size_t)dim_ * KEY_BLOCK);
    values_ = arena.take<T>((size_t)columns_ * KEY_BLOCK);
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

  // Where the keys of a block are, as offsets into the caches, of head 0. Behind the last key that
  // is read stands that key again.
  void find_keys(int block, int64_t* offsets) const {
    const int size = plan_.shape.block_size;
    const int64_t stride = (int64_t)plan_.shape.kv_heads * dim_;
    const int32_t* table = plan_.rows.block_tables + (size_t)task_.row * plan_.rows.width;
    int key = block * KEY_BLOCK, end = std::min(key + KEY_BLOCK, keys_end_), count = 0;
    int place = key / size, inside = key % size;
    while (key < end) {
      int64_t at = ((int64_t)table[place++] * size + inside) * stride;
      for (int stop = std::min(key + size - inside, end); key < stop; key++, at += stride)
        offsets[count++] = at;
      inside = 0;
    }
    for (; count < KEY_BLOCK; count++) offsets[count] = offsets[count - 1];
  }

  // Key blocks of one segment. While one is computed for a key head, what comes next is fetched.
  void attend_all(int begin, int end) {
    end = std::min(end, ceil_div(keys_end_, KEY_BLOCK));  // the first of a row's tokens see less
    if (begin >= end) return;
    const int parts = ceil_div(per_head_, MOST_ROWS);
    int64_t offsets[2][KEY_BLOCK] = {};
    Fetch keys, values;
    find_keys(begin, offsets[begin & 1]);
    for (int block = begin; block < end; block++) {
      const int64_t* here = offsets[block & 1];
      int64_t* then = offsets[(block + 1) & 1];
      const bool more = (block + 1) * KEY_BLOCK < keys_end_;
      if (more) find_keys(block + 1, then);
      const int start = block * KEY_BLOCK, count = std::min(KEY_BLOCK, keys_end_ - start);
      const bool whole = start + KEY_BLOCK <= lowest_ + 1 && start > highest_ - window();
      for (int head = task_.kv_begin; head < task_.kv_end; head++) {
        const size_t own = (size_t)head * dim_;
        pack_keys(call_.k_cache + own, here, ceil_div(count, LANES) * LANES, dim_, keys_);
        pack_values(call_.v_cache + own, here, ceil_div(count, 2) * 2, dim_, columns_, values_);
        const bool last = head + 1 == task_.kv_end;
        locate(last ? then : here, last ? task_.kv_begin : head + 1, keys, values);
        for (int i = 0; i < parts; i++) {
          const bool fetches = i + 1 == parts && (more || !last);
          attend(start, whole, (head - task_.kv_begin) * per_head_, cut(per_head_, i, parts),
                 cut(per_head_, i + 1, parts), fetches ? &keys : nullptr,
                 fetches ? &values : nullptr);
        }
      }
    }
  }

  void locate(const int64_t* offsets, int head, Fetch& keys, Fetch& values) const {
    const T* k = call_.k_cache + (size_t)head * dim_;
    const T* v = call_.v_cache + (size_t)head * dim_;
    keys.lines = values.lines = ceil_div(dim_ * (int)sizeof(T), 64);
    for (int i = 0; i < KEY_BLOCK; i++) {
      keys.at[i] = reinterpret_cast<const char*>(k + offsets[i]);
      values.at[i] = reinterpret_cast<const char*>(v + offsets[i]);
    }
  }

  // Queries offset + begin : offset + end, at most MOST_ROWS, and the packed keys from `start` on.
  // `whole`: all of the task's queries see all of them.
  void attend(int start, bool whole, int offset, int begin, int end, const Fetch* next_keys,
              const Fetch* next_values) {
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
    multiply(queries_at_ + (size_t)first * dim_, dim_, rows, keys_, KEY_BLOCK, vecs, dim_, scores_,
             nullptr, next_keys);
    float keep[MOST_ROWS];
    for (int i = 0; i < rows; i++)
      keep[i] = soften(scores_ + i * KEY_BLOCK, vecs,
                       whole ? 0 : position[i] - window() + 1 - start,
                       whole ? KEY_BLOCK : position[i] + 1 - start, scale(), now_.base[first + i],
                       now_.sums + (first + i) * LANES, weights_ + i * KEY_BLOCK);
    multiply(weights_, KEY_BLOCK, rows, values_, columns_, columns_ / LANES, ceil_div(count, 2) * 2,
             now_.values + (size_t)first * columns_, keep, next_values);
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
  const int group_, dim_, columns_;
  const int per_head_, queries_;
  int lowest_, highest_;  // positions
  int first_visible_;     // key block
  int keys_end_;          // positions from here on are not read
  T* queries_at_;         // [queries, dim]
  int* positions_;        // [per_head]
  State now_, total_;     // of the segment at hand; of those before it
  T *keys_, *values_;     // packed
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
